-- Notes that an epoch will never be complete, unless it was released since: its manifest must not come back as a part.
-- The epoch of a newer stream of the same name stays as it is.
--
-- KEYS: manifest epochs meta
-- ARGV: manifest_id epoch stream_id
-- Answer: 1; 0 if a key is another's
-- Callers: penstock_common/stream/manifest.py

redis.call('HDEL', KEYS[1], '') -- the first write frees, so that the server permits the next at maxmemory

if redis.call('HGET', KEYS[1], 'id') ~= ARGV[1] or redis.call('HGET', KEYS[3], 'id') ~= ARGV[3] then return 0 end
redis.call('HSET', KEYS[1], 'state', 'abandoned')
redis.call('HSET', KEYS[2], ARGV[2], 'abandoned')
return 1
