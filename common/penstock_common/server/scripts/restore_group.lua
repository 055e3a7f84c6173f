-- Puts a group back on a roster that lost it, as another partition's roster has it, and its member. What the roster
-- still has of the group stays. The member replaces the one that the caller saw, which gives no heartbeat. Closed are
-- the epochs that the group has acknowledged. An epoch begins at its first entry, because the ledger, which is of the
-- same slot, says what of it is done.
--
-- KEYS: roster entries..
-- ARGV: group record member incarnation before closed_count closed.. epoch..; an empty member restores the group alone,
--   and before is the member's record as the caller saw it, or empty
-- Answer: 1; 0 if the caller did not know every epoch; -1 if the member's record is another one now
-- Callers: penstock_common/stream/groups/roster.py

redis.call('HDEL', KEYS[1], '') -- the first write frees, so that the server permits the next at maxmemory

local group, member, before, count = ARGV[1], ARGV[3], ARGV[5], tonumber(ARGV[6])
local given, closed = {}, {}
for i = 7, 6 + count do closed[ARGV[i]] = true end
for i = 7 + count, #ARGV do given[ARGV[i]] = KEYS[i - 5 - count] end
for _, field in ipairs(redis.call('HKEYS', KEYS[1])) do
  if string.sub(field, 1, 2) == 'e:' and not given[string.sub(field, 3)] then return 0 end
end
local name = group .. ':' .. member
local text = redis.call('HGET', KEYS[1], 'm:' .. name) or ''
local is_mine = text ~= '' and cjson.decode(text).inc == ARGV[4]
if member ~= '' and text ~= before and not is_mine then return -1 end
local now = redis.call('TIME')
now = tonumber(now[1]) * 1000 + math.floor(tonumber(now[2]) / 1000)
local record = cjson.decode(redis.call('HGET', KEYS[1], 'g:' .. group) or ARGV[2])
if redis.call('HEXISTS', KEYS[1], 'g:' .. group) == 0 then
  record.seen = now
  redis.call('HINCRBY', KEYS[1], 'gen', 1)
  redis.call('HSET', KEYS[1], 'g:' .. group, cjson.encode(record))
end
if member ~= '' and not is_mine then
  local mine = cjson.encode({inc = ARGV[4], seen = now})
  if text ~= '' then redis.call('HSET', KEYS[1], 'o:' .. name, mine) end -- the process before it must learn of it
  redis.call('HSET', KEYS[1], 'm:' .. name, mine)
end
for epoch, key in pairs(given) do
  if redis.call('HEXISTS', KEYS[1], 'e:' .. epoch) == 1 and tonumber(epoch) >= record.first then
    if closed[epoch] then redis.call('HSET', KEYS[1], 'd:' .. group .. ':' .. epoch, '1') end
    if record.kind == 'shared' then
      local made = redis.pcall('XGROUP', 'CREATE', key, group, closed[epoch] and '$' or '0')
      if made.err and not string.find(made.err, 'BUSYGROUP') then return made end
    end
  end
end
return 1
