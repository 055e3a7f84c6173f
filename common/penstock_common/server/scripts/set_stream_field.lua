-- Sets a field of a stream's meta key, if the stream still exists.
--
-- KEYS: meta
-- ARGV: stream_id field value
-- Answer: 1; -1 if the stream is gone
-- Callers: penstock_common/stream/streams.py

redis.call('HDEL', KEYS[1], '') -- the first write frees, so that the server permits the next at maxmemory

-- A stream that somebody deleted meanwhile must not come back as a part of its meta key.
local found = redis.call('HMGET', KEYS[1], 'id', 'deleting')
if found[1] ~= ARGV[1] or found[2] then return -1 end

redis.call('HSET', KEYS[1], ARGV[2], ARGV[3])
return 1
