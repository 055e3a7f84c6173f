-- Registers an epoch in a partition first, and then makes every (epoch, group) pair at position 0.
--
-- KEYS: roster state entries
-- ARGV: epoch manifest_id
-- Answer: 1; 0 if somebody releases the epoch at this moment
-- Callers: penstock_common/stream/manifest.py

local epoch, id = ARGV[1], ARGV[2]
if redis.call('HEXISTS', KEYS[1], 'x:' .. epoch) == 1 then return 0 end
local known = redis.call('HGET', KEYS[1], 'e:' .. epoch)
if known and known ~= id then return redis.error_reply('PENSTOCK epoch has another manifest') end
redis.call('HSET', KEYS[1], 'e:' .. epoch, id)
redis.call('SET', KEYS[2], 'live:' .. id, 'NX')
local groups = {'_last'}
local all = redis.call('HGETALL', KEYS[1])
for i = 1, #all, 2 do
  local record = string.sub(all[i], 1, 2) == 'g:' and cjson.decode(all[i + 1])
  if record and record.kind == 'shared' and record.first <= tonumber(epoch) then
    groups[#groups + 1] = string.sub(all[i], 3)
  end
end
for _, group in ipairs(groups) do
  local made = redis.pcall('XGROUP', 'CREATE', KEYS[3], group, '0', 'MKSTREAM')
  if made.err and not string.find(made.err, 'BUSYGROUP') then return made end
end
return 1
