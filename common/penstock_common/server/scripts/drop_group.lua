-- Removes a group with its members and closed epochs from the roster, and destroys its Redis groups.
--
-- KEYS: roster entries..
-- ARGV: group
-- Answer: 1; 0 if there was no such group
-- Callers: penstock_common/stream/groups/forgetting.py

local found = redis.call('HDEL', KEYS[1], 'g:' .. ARGV[1])
for _, field in ipairs(redis.call('HKEYS', KEYS[1])) do
  for _, prefix in ipairs({'m:', 'o:', 'd:'}) do
    local start = prefix .. ARGV[1] .. ':'
    if string.sub(field, 1, #start) == start then redis.call('HDEL', KEYS[1], field) end
  end
end
for k = 2, #KEYS do redis.pcall('XGROUP', 'DESTROY', KEYS[k], ARGV[1]) end
if found == 1 then redis.call('HINCRBY', KEYS[1], 'gen', 1) end
return found
