-- Takes back what open_epoch made of an epoch that was released meanwhile. Keys of another manifest stay.
--
-- KEYS: roster state entries
-- ARGV: epoch manifest_id
-- Answer: 1; 0 if there was nothing of this manifest
-- Callers: penstock_common/stream/manifest.py

local epoch, id = ARGV[1], ARGV[2]
if redis.call('HGET', KEYS[1], 'e:' .. epoch) ~= id then return 0 end
local bytes = tonumber(redis.call('HGET', KEYS[1], 'b:' .. epoch) or '0')
if bytes ~= 0 then redis.call('HINCRBY', KEYS[1], 'bytes', 0 - bytes) end
redis.call('HDEL', KEYS[1], 'e:' .. epoch, 't:' .. epoch, 'b:' .. epoch, 'p:' .. epoch)
if redis.call('GET', KEYS[2]) == 'live:' .. id then redis.call('UNLINK', KEYS[2]) end
redis.call('UNLINK', KEYS[3])
return 1
