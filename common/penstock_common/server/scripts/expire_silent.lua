-- Removes from the roster: members and replay leases that are silent for silent_ms; notes on members whose names were
-- taken over as long ago; notes of waiting writers that are older than stale_ms. Undeclared groups that are silent
-- for silent_ms stop holding data. With twice = 1 only fields that still have the value of an earlier look count: a
-- live process has renewed its field since, whatever happened to the server's clock.
--
-- KEYS: roster
-- ARGV: silent_ms stale_ms twice [field value]..
-- Answer: the groups that stopped holding data
-- Callers: penstock_common/stream/groups/roster.py

redis.call('HDEL', KEYS[1], '') -- the first write frees, so that the server permits the next at maxmemory

local same = {}
for i = 4, #ARGV, 2 do same[ARGV[i]] = ARGV[i + 1] end
local function is_silent(field, value) return ARGV[3] ~= '1' or same[field] == value end
local now = redis.call('TIME')
now = tonumber(now[1]) * 1000 + math.floor(tonumber(now[2]) / 1000)
local before, stale = now - tonumber(ARGV[1]), now - tonumber(ARGV[2])
local all, expired = redis.call('HGETALL', KEYS[1]), {}
for i = 1, #all, 2 do
  local kind = string.sub(all[i], 1, 2)
  local twice = is_silent(all[i], all[i + 1])
  if (kind == 'm:' or kind == 'o:') and twice and cjson.decode(all[i + 1]).seen < before then
    redis.call('HDEL', KEYS[1], all[i])
  end
  if kind == 'r:' and twice and cjson.decode(all[i + 1]).till < before then redis.call('HDEL', KEYS[1], all[i]) end
  if kind == 'w:' and cjson.decode(all[i + 1]).seen < stale then redis.call('HDEL', KEYS[1], all[i]) end
  if kind == 'g:' and twice then
    local record = cjson.decode(all[i + 1])
    if record.holds and not record.declared and record.seen < before then
      record.holds = false
      redis.call('HSET', KEYS[1], all[i], cjson.encode(record))
      expired[#expired + 1] = string.sub(all[i], 3)
    end
  end
end
return expired
