-- The heartbeat of a member: renews the leases that XPENDING still lists for it. idle_ms is how long its loop has
-- waited for a batch, or -1 while it does not wait. handed_bytes counts what it was given and has not acknowledged.
--
-- KEYS: roster entries..
-- ARGV: group member incarnation idle_ms handed_bytes, then for each entries key: n id1..idn
-- Answer: for each entries key the ids that the member no longer holds
-- Callers: penstock_common/stream/groups/roster.py

redis.call('HDEL', KEYS[1], '') -- the first write frees, so that the server permits the next at maxmemory

-- Decodes a record of the roster. Lua takes a field of a string for nil, so the type is checked first.
local function decoded(text, field)
  local value = cjson.decode(text)
  if type(value) ~= 'table' then error('Expected an object, found ' .. string.sub(text, 1, 40)) end
  if field and type(value[field]) ~= 'string' then
    error('Expected an object with ' .. field .. ', found ' .. string.sub(text, 1, 40))
  end
  return value
end

local field = 'm:' .. ARGV[1] .. ':' .. ARGV[2]
local text = redis.call('HGET', KEYS[1], field)
local group = redis.call('HGET', KEYS[1], 'g:' .. ARGV[1])
local owner = text or redis.call('HGET', KEYS[1], 'o:' .. ARGV[1] .. ':' .. ARGV[2])
if not group or not owner then return redis.error_reply('PENSTOCK gone') end
if decoded(owner, 'inc').inc ~= ARGV[3] then return redis.error_reply('PENSTOCK replaced') end
if not text then return redis.error_reply('PENSTOCK gone') end
local now = redis.call('TIME')
now = tonumber(now[1]) * 1000 + math.floor(tonumber(now[2]) / 1000)
local member = {inc = ARGV[3], seen = now}
if tonumber(ARGV[4]) >= 0 then member.idle, member.handed = now - tonumber(ARGV[4]), tonumber(ARGV[5]) end
redis.call('HSET', KEYS[1], field, cjson.encode(member))
local record = cjson.decode(group)
record.seen = now
redis.call('HSET', KEYS[1], 'g:' .. ARGV[1], cjson.encode(record))
local at, lost = 6, {}
for k = 2, #KEYS do
  local gone, mine = {}, {}
  for i = at + 1, at + tonumber(ARGV[at]) do
    local pending = redis.pcall('XPENDING', KEYS[k], ARGV[1], ARGV[i], ARGV[i], 1, ARGV[2])
    if pending.err or #pending == 0 then gone[#gone + 1] = ARGV[i] else mine[#mine + 1] = ARGV[i] end
  end
  for i = 1, #mine do redis.call('XCLAIM', KEYS[k], ARGV[1], ARGV[2], 0, mine[i], 'JUSTID') end
  at = at + 1 + tonumber(ARGV[at])
  lost[#lost + 1] = gone
end
return lost
