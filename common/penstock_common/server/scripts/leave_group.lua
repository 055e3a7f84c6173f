-- A member returns its entries and leaves. An undeclared group without members stops holding data.
--
-- KEYS: roster entries..
-- ARGV: group member incarnation, then for each entries key: n id1..idn
-- Answer: 1; 0 if another process has the name
-- Callers: penstock_common/stream/groups/roster.py

redis.call('HDEL', KEYS[1], '') -- the first write frees, so that the server permits the next at maxmemory

local field = 'm:' .. ARGV[1] .. ':' .. ARGV[2]
local text = redis.call('HGET', KEYS[1], field)
if not text or cjson.decode(text).inc ~= ARGV[3] then return 0 end
local at = 4
for k = 2, #KEYS do
  for i = at + 1, at + tonumber(ARGV[at]) do
    local pending = redis.pcall('XPENDING', KEYS[k], ARGV[1], ARGV[i], ARGV[i], 1, ARGV[2])
    if not pending.err and #pending == 1 then
      redis.call('XCLAIM', KEYS[k], ARGV[1], '~released', 0, ARGV[i], 'JUSTID')
    end
  end
  at = at + 1 + tonumber(ARGV[at])
end
redis.call('HDEL', KEYS[1], field)
local prefix, alone = 'm:' .. ARGV[1] .. ':', true
for _, other in ipairs(redis.call('HKEYS', KEYS[1])) do
  if string.sub(other, 1, #prefix) == prefix then alone = false end
end
local group = redis.call('HGET', KEYS[1], 'g:' .. ARGV[1])
if alone and group then
  local record = cjson.decode(group)
  if not record.declared then
    record.holds = false
    redis.call('HSET', KEYS[1], 'g:' .. ARGV[1], cjson.encode(record))
  end
end
return 1
