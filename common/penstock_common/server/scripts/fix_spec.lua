-- Fixes the spec of a stream; the first one stays.
--
-- KEYS: meta
-- ARGV: stream_id spec
-- Answer: the spec of the stream; -1 if the stream is gone
-- Callers: penstock_common/stream/streams.py

-- A stream that somebody deleted meanwhile must not come back as a part of its meta key.
local found = redis.call('HMGET', KEYS[1], 'id', 'deleting')
if found[1] ~= ARGV[1] or found[2] then return -1 end

local known = redis.call('HGET', KEYS[1], 'spec')
if known and known ~= '' then return known end
redis.call('HSET', KEYS[1], 'spec', ARGV[2])
return ARGV[2]
