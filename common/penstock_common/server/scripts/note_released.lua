-- Stores the numbers of the released epochs, if they are still those that the caller read.
--
-- KEYS: meta
-- ARGV: stream_id before after
-- Answer: 1; 0 if somebody changed them since; -1 if the stream is gone
-- Callers: penstock_common/stream/removal/deletion.py

redis.call('HDEL', KEYS[1], '') -- the first write frees, so that the server permits the next at maxmemory

local found = redis.call('HMGET', KEYS[1], 'id', 'released')
if found[1] ~= ARGV[1] then return -1 end
if (found[2] or '') ~= ARGV[2] then return 0 end
redis.call('HSET', KEYS[1], 'released', ARGV[3])
return 1
