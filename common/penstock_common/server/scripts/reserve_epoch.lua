-- Reserves the number of an epoch. Jobs open the same epoch at the same time, so one step raises the counter. An
-- empty epoch takes the next number.
--
-- KEYS: meta
-- ARGV: stream_id epoch
-- Answer: the number; -1 if the stream is gone
-- Callers: penstock_common/stream/manifest.py

-- A stream that somebody deleted meanwhile must not come back as a part of its meta key.
local found = redis.call('HMGET', KEYS[1], 'id', 'deleting')
if found[1] ~= ARGV[1] or found[2] then return -1 end

local following = tonumber(redis.call('HGET', KEYS[1], 'next_epoch') or '0')
local epoch = tonumber(ARGV[2]) or following
if following <= epoch then redis.call('HSET', KEYS[1], 'next_epoch', epoch + 1) end
return epoch
