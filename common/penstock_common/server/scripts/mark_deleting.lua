-- Marks a stream as one that somebody deletes.
--
-- KEYS: meta
-- ARGV: stream_id now_ms
-- Answer: 1; 0 if the stream is another one
-- Callers: penstock_common/stream/removal/deletion.py

redis.call('HDEL', KEYS[1], '') -- the first write frees, so that the server permits the next at maxmemory

if redis.call('HGET', KEYS[1], 'id') ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'deleting', ARGV[2])
return 1
