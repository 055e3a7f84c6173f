-- Begins the epoch of the next number, unless another process has numbered one since the caller looked. Writers of a
-- feed that start together would otherwise open an epoch each, and groups read epochs one after the other.
--
-- KEYS: meta manifest epochs
-- ARGV: stream_id epoch manifest_id state [field value]..
-- Answer: 1, also to the same call again; 0 if the next epoch has another number, or its number is in use; -1 if the
--   stream is gone
-- Callers: penstock_common/stream/manifest.py

-- A stream that somebody deleted meanwhile must not come back as a part of its meta key.
local found = redis.call('HMGET', KEYS[1], 'id', 'deleting', 'next_epoch')
if found[1] ~= ARGV[1] or found[2] then return -1 end

if redis.call('HGET', KEYS[2], 'id') == ARGV[3] then return 1 end
if tonumber(found[3] or '0') ~= tonumber(ARGV[2]) then return 0 end
redis.call('HSET', KEYS[1], 'next_epoch', ARGV[2] + 1)
-- the number is in use after all, because the server came back with an older counter
if redis.call('HSETNX', KEYS[2], 'id', ARGV[3]) == 0 then return 0 end
for i = 5, #ARGV, 2 do redis.call('HSETNX', KEYS[2], ARGV[i], ARGV[i + 1]) end
redis.call('HSETNX', KEYS[3], ARGV[2], ARGV[4])
return 1
