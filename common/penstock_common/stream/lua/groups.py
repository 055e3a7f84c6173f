"""The Lua of groups, members and replay leases: joining, renewing, leaving, dropping, on one partition's roster.

Who calls it, and how its replies read, is ``roster``'s.
"""

from __future__ import annotations

from penstock_common.stream.lua.pieces import DECODED, GO_ON, MINIMUM

JOIN_GROUP = (
    GO_ON
    + MINIMUM
    + DECODED
    + """
-- KEYS roster keys.. | ARGV group member incarnation declared first raise force kind world batch quiet_ms epochs..
-- keys: each epoch's entries, of an ordered group its positions. member '' only declares, kind '' takes what it is;
-- world and batch 0 are not known yet. Returns {'epochs'} when the caller knew not every epoch, {'lost', lo, hi},
-- {'kind', found}, {'batch', found}, {'busy', world, members..}, or {'joined', first, was_new}
local group, member, incarnation, declared = ARGV[1], ARGV[2], ARGV[3], ARGV[4] == '1'
local first, raise, force = tonumber(ARGV[5]), ARGV[6] == '1', ARGV[7] == '1'
local kind, world, batch, quiet_ms = ARGV[8], tonumber(ARGV[9]), tonumber(ARGV[10]), tonumber(ARGV[11])
local given, lowest, whole = {}, nil, 0
for i = 12, #ARGV do given[ARGV[i]] = KEYS[i - 10] end
local all = redis.call('HGETALL', KEYS[1])
for i = 1, #all, 2 do
  local kind, rest = string.sub(all[i], 1, 2), string.sub(all[i], 3)
  if kind == 'e:' then
    if not given[rest] then return {'epochs'} end
    if not lowest or tonumber(rest) < lowest then lowest = tonumber(rest) end
  elseif kind == 't:' then whole = math.max(whole, tonumber(rest) + 1) end
end
local now = redis.call('TIME')
now = tonumber(now[1]) * 1000 + math.floor(tonumber(now[2]) / 1000)
local text = redis.call('HGET', KEYS[1], 'g:' .. group)
local record, new = nil, 0
if text then
  record = decoded(text)
  if kind ~= '' and record.kind ~= kind then return {'kind', record.kind} end
  if batch > 0 and (record.batch or batch) ~= batch then return {'batch', record.batch} end
  if record.lost and not force then return {'lost', record.lost[1], record.lost[2]} end
  if raise then record.first = math.max(record.first, first) end
else
  new = 1
  record = {kind = kind == '' and 'shared' or kind, first = math.max(first, whole, lowest or 0), declared = false}
end
if world > 0 and (record.world or world) ~= world then -- other ranks: only when nobody is left of the old ones
  local prefix, old, busy = 'm:' .. group .. ':', {}, {'busy', record.world}
  for i = 1, #all, 2 do
    if string.sub(all[i], 1, #prefix) == prefix and all[i] ~= prefix .. member then
      old[#old + 1] = all[i]
      if cjson.decode(all[i + 1]).seen > now - quiet_ms then busy[#busy + 1] = string.sub(all[i], #prefix + 1) end
    end
  end
  if #busy > 2 then return busy end
  for _, field in ipairs(old) do redis.call('HDEL', KEYS[1], field) end
  for _, key in pairs(given) do
    local floor = minimum(key, record.world)
    redis.call('DEL', key)
    if floor > 0 then redis.call('HSET', key, 'floor', floor) end
  end
end
if world > 0 then record.world, record.batch = world, batch end
record.lost = nil
record.declared = record.declared or declared
if not record.holds then redis.call('HINCRBY', KEYS[1], 'gen', 1) end
record.holds, record.seen = true, now
redis.call('HSET', KEYS[1], 'g:' .. group, cjson.encode(record))
if member ~= '' then
  local name, mine = group .. ':' .. member, cjson.encode({inc = incarnation, seen = now})
  local before = redis.call('HGET', KEYS[1], 'm:' .. name)
  if before and decoded(before, 'inc').inc ~= incarnation then -- it may live, and look only when this one has left
    redis.call('HSET', KEYS[1], 'o:' .. name, mine)
  end
  redis.call('HSET', KEYS[1], 'm:' .. name, mine)
end
for epoch, key in pairs(given) do
  if tonumber(epoch) >= record.first and record.kind == 'shared' then
    local made = redis.pcall('XGROUP', 'CREATE', key, group, '0')
    if made.err and not string.find(made.err, 'BUSYGROUP') then return made end
  end
end
return {'joined', record.first, new}
"""
)

RESET_GROUP = (
    GO_ON
    + """
-- KEYS roster entries.. | ARGV group first epochs.. : the group reads again from epoch `first`. The generation rises,
-- so that a release or trim planned before is refused.
local text = redis.call('HGET', KEYS[1], 'g:' .. ARGV[1])
if not text then return redis.error_reply('PENSTOCK no group') end
local record = cjson.decode(text)
record.first, record.lost = tonumber(ARGV[2]), nil
redis.call('HSET', KEYS[1], 'g:' .. ARGV[1], cjson.encode(record))
redis.call('HINCRBY', KEYS[1], 'gen', 1)
for i = 3, #ARGV do
  redis.call('HDEL', KEYS[1], 'd:' .. ARGV[1] .. ':' .. ARGV[i])
  redis.pcall('XGROUP', 'DESTROY', KEYS[i - 1], ARGV[1])
  if tonumber(ARGV[i]) >= record.first and record.kind == 'shared' then
    redis.call('XGROUP', 'CREATE', KEYS[i - 1], ARGV[1], '0')
  end
end
return 1
"""
)

BEAT = (
    GO_ON
    + DECODED
    + """
-- KEYS roster entries.. | ARGV group member incarnation idle_ms handed_bytes, then per entries key: n id1..idn
-- idle_ms is how long the member's loop has waited for a batch, -1 where it does not wait; handed_bytes what it was
-- given and has not settled. Renews what XPENDING still lists under this member. Returns, per key, the ids it no longer
-- holds.
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
"""
)

LEAVE = (
    GO_ON
    + """
-- KEYS roster entries.. | ARGV group member incarnation, then per entries key: n id1..idn
-- Hands the ids back, signs the member off; an undeclared group without members stops holding data.
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
"""
)

CLOSE_FOR_GROUP = (
    GO_ON
    + """
-- KEYS roster | ARGV group epoch : the ledger covers the manifest
if redis.call('HEXISTS', KEYS[1], 'g:' .. ARGV[1]) == 0 then return 0 end
return redis.call('HSET', KEYS[1], 'd:' .. ARGV[1] .. ':' .. ARGV[2], '1')
"""
)

EXPIRE_SILENT = (
    GO_ON
    + """
-- KEYS roster | ARGV silent_ms stale_ms twice field1 value1 .. : members unseen for so long go, and notes of
-- names taken over so long ago; undeclared groups unseen for so long stop holding data; notes of waiting writers go
-- when they are stale. With twice = 1 only fields that still have the value of an earlier look: whoever lives has
-- renewed since, whatever this server's clock did.
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
"""
)

DROP_GROUP = """
-- KEYS roster entries.. | ARGV group : off the roster, with its members and closed epochs; its groups go too
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
"""

REPLAY_LEASE = (
    GO_ON
    + """
-- KEYS roster | ARGV token epoch ttl_ms must_exist : holds an epoch for a replay; refused once it is gone or lapsed.
-- With a new lease the generation rises, so that a release or trim planned before is refused.
if redis.call('HEXISTS', KEYS[1], 'e:' .. ARGV[2]) == 0 then return 0 end
local now = redis.call('TIME')
now = tonumber(now[1]) * 1000 + math.floor(tonumber(now[2]) / 1000)
if ARGV[4] == '1' then
  local text = redis.call('HGET', KEYS[1], 'r:' .. ARGV[1])
  if not text or cjson.decode(text).till < now then return 0 end
elseif redis.call('HEXISTS', KEYS[1], 'r:' .. ARGV[1]) == 0 then
  redis.call('HINCRBY', KEYS[1], 'gen', 1)
end
redis.call('HSET', KEYS[1], 'r:' .. ARGV[1], cjson.encode({epoch = tonumber(ARGV[2]), till = now + tonumber(ARGV[3])}))
return 1
"""
)
