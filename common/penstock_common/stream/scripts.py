"""The Lua scripts: short, ids and counters only, never a payload; each names only keys it is given.

What they are for and how their replies read is said where they are called (manifest, roster, entries, ledger).
"""

from __future__ import annotations

_GO_ON = """
redis.call('HDEL', KEYS[1], '')
"""
"""What releases, renews or completes must not fail at maxmemory: a script whose first write is one that frees memory
may go on to write (design.md 5.3)."""

OPEN_EPOCH = """
-- KEYS roster state entries | ARGV epoch manifest_id : registers first, then makes every (epoch, group) pair at 0
local epoch, id = ARGV[1], ARGV[2]
local known = redis.call('HGET', KEYS[1], 'e:' .. epoch)
if known and known ~= id then return redis.error_reply('PENSTOCK epoch has another manifest') end
redis.call('HSET', KEYS[1], 'e:' .. epoch, id)
redis.call('SET', KEYS[2], 'live:' .. id, 'NX')
local groups = {'_last'}
local all = redis.call('HGETALL', KEYS[1])
for i = 1, #all, 2 do
  if string.sub(all[i], 1, 2) == 'g:' and cjson.decode(all[i + 1]).first <= tonumber(epoch) then
    groups[#groups + 1] = string.sub(all[i], 3)
  end
end
for _, group in ipairs(groups) do
  local made = redis.pcall('XGROUP', 'CREATE', KEYS[3], group, '0', 'MKSTREAM')
  if made.err and not string.find(made.err, 'BUSYGROUP') then return made end
end
return 1
"""

JOIN_GROUP = (
    _GO_ON
    + """
-- KEYS roster entries.. | ARGV group member incarnation declared first raise force ordered_epochs..
-- member '' only declares. Returns {'epochs'} when the caller knew not every epoch, {'lost', lo, hi},
-- or {'joined', first, was_new}
local group, member, incarnation, declared = ARGV[1], ARGV[2], ARGV[3], ARGV[4] == '1'
local first, raise, force = tonumber(ARGV[5]), ARGV[6] == '1', ARGV[7] == '1'
local given, lowest, whole = {}, nil, 0
for i = 8, #ARGV do given[ARGV[i]] = KEYS[i - 6] end
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
  record = cjson.decode(text)
  if record.lost and not force then return {'lost', record.lost[1], record.lost[2]} end
  if raise then record.first = math.max(record.first, first) end
else
  new = 1
  record = {kind = 'shared', first = math.max(first, whole, lowest or 0), declared = false}
end
record.lost = nil
record.declared = record.declared or declared
if not record.holds then redis.call('HINCRBY', KEYS[1], 'gen', 1) end
record.holds, record.seen = true, now
redis.call('HSET', KEYS[1], 'g:' .. group, cjson.encode(record))
if member ~= '' then
  redis.call('HSET', KEYS[1], 'm:' .. group .. ':' .. member, cjson.encode({inc = incarnation, seen = now}))
end
for epoch, key in pairs(given) do
  if tonumber(epoch) >= record.first then
    local made = redis.pcall('XGROUP', 'CREATE', key, group, '0')
    if made.err and not string.find(made.err, 'BUSYGROUP') then return made end
  end
end
return {'joined', record.first, new}
"""
)

RESET_GROUP = (
    _GO_ON
    + """
-- KEYS roster entries.. | ARGV group first epochs.. : the group reads again from epoch `first`
local text = redis.call('HGET', KEYS[1], 'g:' .. ARGV[1])
if not text then return redis.error_reply('PENSTOCK no group') end
local record = cjson.decode(text)
record.first, record.lost = tonumber(ARGV[2]), nil
redis.call('HSET', KEYS[1], 'g:' .. ARGV[1], cjson.encode(record))
for i = 3, #ARGV do
  redis.call('HDEL', KEYS[1], 'd:' .. ARGV[1] .. ':' .. ARGV[i])
  redis.pcall('XGROUP', 'DESTROY', KEYS[i - 1], ARGV[1])
  if tonumber(ARGV[i]) >= record.first then redis.call('XGROUP', 'CREATE', KEYS[i - 1], ARGV[1], '0') end
end
return 1
"""
)

BEAT = (
    _GO_ON
    + """
-- KEYS roster entries.. | ARGV group member incarnation, then per entries key: n id1..idn
-- Renews what XPENDING still lists under this member. Returns the ids it no longer holds, per key.
local field = 'm:' .. ARGV[1] .. ':' .. ARGV[2]
local text = redis.call('HGET', KEYS[1], field)
local group = redis.call('HGET', KEYS[1], 'g:' .. ARGV[1])
if not group or not text then return redis.error_reply('PENSTOCK gone') end
if cjson.decode(text).inc ~= ARGV[3] then return redis.error_reply('PENSTOCK replaced') end
local now = redis.call('TIME')
now = tonumber(now[1]) * 1000 + math.floor(tonumber(now[2]) / 1000)
redis.call('HSET', KEYS[1], field, cjson.encode({inc = ARGV[3], seen = now}))
local record = cjson.decode(group)
record.seen = now
redis.call('HSET', KEYS[1], 'g:' .. ARGV[1], cjson.encode(record))
local at, lost = 4, {}
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
    _GO_ON
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

COMMIT = """
-- KEYS entries index roster | ARGV epoch end first count bytes holes : runs right after the XADD in one MULTI.
-- Learns the new id without reading the payload, and refuses if nothing was appended.
local function last()
  for _, group in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
    for i = 1, #group, 2 do
      if group[i] == 'name' and group[i + 1] == '_last' then
        for j = 1, #group, 2 do if group[j] == 'last-delivered-id' then return group[j + 1] end end
      end
    end
  end
end
local id = ''
if tonumber(ARGV[4]) > 0 then
  local before = last()
  redis.call('XGROUP', 'SETID', KEYS[1], '_last', '$')
  id = last()
  if id == before then return redis.error_reply('PENSTOCK nothing was appended') end
end
redis.call('XADD', KEYS[2], ARGV[2] .. '-0', 'e', id, 'f', ARGV[3], 'n', ARGV[4], 'b', ARGV[5], 'h', ARGV[6])
redis.call('HINCRBY', KEYS[3], 'b:' .. ARGV[1], ARGV[5])
return {id, redis.call('HINCRBY', KEYS[3], 'bytes', ARGV[5])}
"""

ACK = """
-- KEYS state entries ledger.. | ARGV live_state group n id1..idn, then per ledger: m lo1 hi1 .. : bits [lo, hi)
-- The first write is always an XACK: at maxmemory a script that starts with one may go on to write (design.md 5.3).
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return -1 end
local n, at = tonumber(ARGV[3]), 4
redis.call('XACK', KEYS[2], ARGV[2], '0-0')
for i = at, at + n - 1 do redis.call('XACK', KEYS[2], ARGV[2], ARGV[i]) end
at = at + n
for k = 3, #KEYS do
  local m = tonumber(ARGV[at])
  for r = 0, m - 1 do
    local lo, hi = tonumber(ARGV[at + 1 + 2 * r]), tonumber(ARGV[at + 2 + 2 * r])
    while lo < hi and lo % 8 ~= 0 do redis.call('SETBIT', KEYS[k], lo, 1) lo = lo + 1 end
    while hi > lo and hi % 8 ~= 0 do hi = hi - 1 redis.call('SETBIT', KEYS[k], hi, 1) end
    if hi > lo then redis.call('SETRANGE', KEYS[k], lo / 8, string.rep('\\255', (hi - lo) / 8)) end
  end
  at = at + 1 + 2 * m
end
return n
"""

BURY = """
-- KEYS state entries dead | ARGV live_state group id reason : a dead letter of this group, kept by its id
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return -1 end
redis.call('XACK', KEYS[2], ARGV[2], ARGV[3])
redis.call('HSET', KEYS[3], ARGV[3], ARGV[4])
return 1
"""

CLOSE_FOR_GROUP = (
    _GO_ON
    + """
-- KEYS roster | ARGV group epoch : the ledger covers the manifest
if redis.call('HEXISTS', KEYS[1], 'g:' .. ARGV[1]) == 0 then return 0 end
return redis.call('HSET', KEYS[1], 'd:' .. ARGV[1] .. ':' .. ARGV[2], '1')
"""
)

EXPIRE_SILENT = (
    _GO_ON
    + """
-- KEYS roster | ARGV silent_ms : members unseen for so long go; undeclared groups unseen for so long stop holding data
local now = redis.call('TIME')
local before = tonumber(now[1]) * 1000 + math.floor(tonumber(now[2]) / 1000) - tonumber(ARGV[1])
local all, expired = redis.call('HGETALL', KEYS[1]), {}
for i = 1, #all, 2 do
  local kind = string.sub(all[i], 1, 2)
  if kind == 'm:' and cjson.decode(all[i + 1]).seen < before then redis.call('HDEL', KEYS[1], all[i]) end
  if kind == 'r:' and cjson.decode(all[i + 1]).till < before then redis.call('HDEL', KEYS[1], all[i]) end
  if kind == 'g:' then
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
  for _, prefix in ipairs({'m:', 'd:'}) do
    local start = prefix .. ARGV[1] .. ':'
    if string.sub(field, 1, #start) == start then redis.call('HDEL', KEYS[1], field) end
  end
end
for k = 2, #KEYS do redis.pcall('XGROUP', 'DESTROY', KEYS[k], ARGV[1]) end
redis.call('HINCRBY', KEYS[1], 'gen', 1)
return found
"""

_MARK_LOST = """
local function mark_lost(roster, epoch)
  local all = redis.call('HGETALL', roster)
  for i = 1, #all, 2 do
    if string.sub(all[i], 1, 2) == 'g:' then
      local record = cjson.decode(all[i + 1])
      local name = string.sub(all[i], 3)
      if not record.holds and record.first <= epoch
          and redis.call('HEXISTS', roster, 'd:' .. name .. ':' .. epoch) == 0 then
        local lost = record.lost or {epoch, epoch}
        record.lost = {math.min(lost[1], epoch), math.max(lost[2], epoch)}
        redis.call('HSET', roster, all[i], cjson.encode(record))
      end
    end
  end
end
"""

TRIM = (
    _GO_ON
    + _MARK_LOST
    + """
-- KEYS roster entries | ARGV gen epoch id1 bytes1 .. : XDEL of what every group has settled
-- Returns the bytes freed, -1 if the roster changed since it was read.
if (redis.call('HGET', KEYS[1], 'gen') or '0') ~= ARGV[1] then return -1 end
redis.call('HSET', KEYS[1], 't:' .. ARGV[2], '1')
mark_lost(KEYS[1], tonumber(ARGV[2]))
local freed = 0
for i = 3, #ARGV, 2 do
  if redis.call('XDEL', KEYS[2], ARGV[i]) == 1 then freed = freed + tonumber(ARGV[i + 1]) end
end
-- 0 - n, because -n of 0 is '-0', which is no integer
redis.call('HINCRBY', KEYS[1], 'b:' .. ARGV[2], 0 - freed)
redis.call('HINCRBY', KEYS[1], 'bytes', 0 - freed)
return freed
"""
)

RETIRE = (
    _GO_ON
    + _MARK_LOST
    + """
-- KEYS roster state | ARGV gen epoch manifest_id : first step of a release; the keys are unlinked after it
-- gen '' = whatever the roster is.
if ARGV[1] ~= '' and (redis.call('HGET', KEYS[1], 'gen') or '0') ~= ARGV[1] then return -1 end
redis.call('SET', KEYS[2], 'gone:' .. ARGV[3])
mark_lost(KEYS[1], tonumber(ARGV[2]))
local bytes = tonumber(redis.call('HGET', KEYS[1], 'b:' .. ARGV[2]) or '0')
redis.call('HINCRBY', KEYS[1], 'bytes', 0 - bytes)
redis.call('HDEL', KEYS[1], 'e:' .. ARGV[2], 't:' .. ARGV[2], 'b:' .. ARGV[2])
redis.call('HSET', KEYS[1], 'x:' .. ARGV[2], ARGV[3])
for _, field in ipairs(redis.call('HKEYS', KEYS[1])) do
  if string.sub(field, 1, 2) == 'd:' and string.sub(field, -#ARGV[2] - 1) == ':' .. ARGV[2] then
    redis.call('HDEL', KEYS[1], field)
    local name = string.sub(field, 3, -#ARGV[2] - 2)
    local text = redis.call('HGET', KEYS[1], 'g:' .. name)
    if text then
      local record = cjson.decode(text)
      record.read = math.max(record.read or -1, tonumber(ARGV[2]))
      redis.call('HSET', KEYS[1], 'g:' .. name, cjson.encode(record))
    end
  end
end
return bytes
"""
)

FINISH_SHARD = (
    _GO_ON
    + """
-- KEYS manifest events epochs | ARGV manifest_id epoch shard size : produced once every planned shard is done
if redis.call('HGET', KEYS[1], 'id') ~= ARGV[1] then return redis.error_reply('PENSTOCK epoch has another manifest') end
if redis.call('HSETNX', KEYS[1], 'd:' .. ARGV[3], ARGV[4]) == 1 then redis.call('HINCRBY', KEYS[1], 'done', 1) end
local state = redis.call('HGET', KEYS[1], 'state')
if state == 'sized' and redis.call('HGET', KEYS[1], 'done') == redis.call('HGET', KEYS[1], 'shards') then
  redis.call('HSET', KEYS[1], 'state', 'produced')
  redis.call('HSET', KEYS[3], ARGV[2], 'produced')
  redis.call('XADD', KEYS[2], 'MAXLEN', '~', '256', '*', 'produced', ARGV[2])
  return 'produced'
end
return state
"""
)

SIZE_EPOCH = (
    _GO_ON
    + """
-- KEYS manifest events epochs | ARGV manifest_id epoch shards sizes_json
if redis.call('HGET', KEYS[1], 'id') ~= ARGV[1] then return redis.error_reply('PENSTOCK epoch has another manifest') end
local state = redis.call('HGET', KEYS[1], 'state')
if state ~= 'open' then return state end
state = 'sized'
if tonumber(redis.call('HGET', KEYS[1], 'done') or '0') == tonumber(ARGV[3]) then state = 'produced' end
redis.call('HSET', KEYS[1], 'shards', ARGV[3], 'sizes', ARGV[4], 'state', state)
redis.call('HSET', KEYS[3], ARGV[2], state)
redis.call('XADD', KEYS[2], 'MAXLEN', '~', '256', '*', state, ARGV[2])
return state
"""
)

REPLAY_LEASE = (
    _GO_ON
    + """
-- KEYS roster | ARGV token epoch ttl_ms must_exist : holds an epoch for a replay; refused once it is gone or lapsed
if redis.call('HEXISTS', KEYS[1], 'e:' .. ARGV[2]) == 0 then return 0 end
if ARGV[4] == '1' and redis.call('HEXISTS', KEYS[1], 'r:' .. ARGV[1]) == 0 then return 0 end
local now = redis.call('TIME')
now = tonumber(now[1]) * 1000 + math.floor(tonumber(now[2]) / 1000)
redis.call('HSET', KEYS[1], 'r:' .. ARGV[1], cjson.encode({epoch = tonumber(ARGV[2]), till = now + tonumber(ARGV[3])}))
return 1
"""
)

TAKE_SHARD = """
-- KEYS manifest : the next shard of an open epoch for one more writer of a feed, -1 once it is sealed
if redis.call('HGET', KEYS[1], 'state') ~= 'open' or redis.call('HEXISTS', KEYS[1], 'sealed') == 1 then return -1 end
return redis.call('HINCRBY', KEYS[1], 'next_shard', 1) - 1
"""

FINISH_FEED_SHARD = (
    _GO_ON
    + """
-- KEYS manifest events epochs | ARGV manifest_id epoch shard size : seals the epoch; the last writer to finish sizes it
if redis.call('HGET', KEYS[1], 'id') ~= ARGV[1] then return redis.error_reply('PENSTOCK epoch has another manifest') end
redis.call('HSET', KEYS[1], 'sealed', '1')
if redis.call('HSETNX', KEYS[1], 'd:' .. ARGV[3], ARGV[4]) == 1 then redis.call('HINCRBY', KEYS[1], 'done', 1) end
local taken = tonumber(redis.call('HGET', KEYS[1], 'next_shard'))
local done = tonumber(redis.call('HGET', KEYS[1], 'done'))
if redis.call('HGET', KEYS[1], 'state') ~= 'open' or done < taken then return 0 end
local sizes = {}
for shard = 0, taken - 1 do sizes[shard + 1] = redis.call('HGET', KEYS[1], 'd:' .. shard) end
redis.call('HSET', KEYS[1], 'shards', taken, 'sizes', '[' .. table.concat(sizes, ',') .. ']', 'state', 'produced')
redis.call('HSET', KEYS[3], ARGV[2], 'produced')
redis.call('XADD', KEYS[2], 'MAXLEN', '~', '256', '*', 'produced', ARGV[2])
return 1
"""
)

CLOSE_AS_COMMITTED = """
-- KEYS manifest events epochs | ARGV manifest_id epoch sizes.. : an operator's word that no more will come
if redis.call('HGET', KEYS[1], 'id') ~= ARGV[1] then return redis.error_reply('PENSTOCK epoch has another manifest') end
for i = 3, #ARGV do redis.call('HSET', KEYS[1], 'd:' .. (i - 3), ARGV[i]) end
redis.call('HSET', KEYS[1], 'shards', #ARGV - 2, 'done', #ARGV - 2, 'sealed', '1', 'state', 'produced',
  'sizes', '[' .. table.concat(ARGV, ',', 3) .. ']')
redis.call('HSET', KEYS[3], ARGV[2], 'produced')
redis.call('XADD', KEYS[2], 'MAXLEN', '~', '256', '*', 'produced', ARGV[2])
return 1
"""

RESERVE_EPOCH = """
-- KEYS meta | ARGV epoch : jobs open the same epoch at the same time, so the counter is raised in one step
if tonumber(redis.call('HGET', KEYS[1], 'next_epoch') or '0') <= tonumber(ARGV[1]) then
  redis.call('HSET', KEYS[1], 'next_epoch', ARGV[1] + 1)
end
return 1
"""

RESERVE_SHARD = """
-- KEYS manifest | ARGV shard
local taken = tonumber(redis.call('HGET', KEYS[1], 'next_shard') or '0')
if taken <= tonumber(ARGV[1]) then redis.call('HSET', KEYS[1], 'next_shard', ARGV[1] + 1) end
return 1
"""
