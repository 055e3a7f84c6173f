-- Notes that an epoch will never be complete, unless it was released since: its manifest must not come back as a part.
--
-- KEYS: manifest epochs
-- ARGV: manifest_id epoch
-- Answer: 1; 0 if the key holds another manifest or none
-- Callers: penstock_common/stream/manifest.py

if redis.call('HGET', KEYS[1], 'id') ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'state', 'abandoned')
redis.call('HSET', KEYS[2], ARGV[2], 'abandoned')
return 1
