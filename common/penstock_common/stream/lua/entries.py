"""The Lua of entries: a commit's index record, acknowledging, burying, trimming. Ids and counters, never a payload.

Called by ``entries``, ``ledger`` and ``outbox``.
"""

from __future__ import annotations

from penstock_common.stream.lua.pieces import GO_ON, MARK_LOST, NOT_LIVE

COMMIT = """
-- KEYS entries index roster state quarantine (segments) | ARGV live_state epoch end first count bytes holes segment
-- writer, then of each bad sample its field and what is known of it : runs right after the XADD in one MULTI.
-- Learns the new id without reading the payload. Where the epoch takes nothing more, what is committed of the shard
-- does not end at `first`, or its newest record is another writer's, what was appended is taken back before anybody can
-- have seen it, and the answer says how things stand; else it is the bytes of the partition.
local count, id, before = tonumber(ARGV[5]), '', nil
local function last()
  for _, group in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
    for i = 1, #group, 2 do
      if group[i] == 'name' and group[i + 1] == '_last' then
        for j = 1, #group, 2 do if group[j] == 'last-delivered-id' then return group[j + 1] end end
      end
    end
  end
end
local function take_back()
  if id == '' then return end
  redis.call('XDEL', KEYS[1], id)
  redis.call('XGROUP', 'SETID', KEYS[1], '_last', before) -- else audit and deletion take it for an entry
end
local state = redis.call('GET', KEYS[4])
if count == 0 then
  redis.call('HDEL', KEYS[3], '') -- a first write that frees, so that the next may be made at maxmemory
elseif state or redis.call('EXISTS', KEYS[1]) == 1 then -- else it was released, and nothing was appended
  before = last()
  redis.call('XGROUP', 'SETID', KEYS[1], '_last', '$')
  id = last()
  if id == before then return redis.error_reply('PENSTOCK nothing was appended') end
end
local newest = redis.call('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)[1]
local at = newest and newest[1] or '0-0'
local writer = newest and '' or ARGV[9] -- whoever commits first has the shard
if newest then
  for i = 1, #newest[2], 2 do if newest[2][i] == 'w' then writer = newest[2][i + 1] end end
end
if state ~= ARGV[1] or at ~= ARGV[4] .. '-0' or writer ~= ARGV[9] then
  take_back()
  return {at, state or '', redis.call('HGET', KEYS[3], 'bytes') or '0', writer}
end
if ARGV[8] ~= '' and redis.call('HEXISTS', KEYS[6], 's:' .. ARGV[8]) == 1 then
  -- its file may be another one by now; sent before, and late: nothing of it may stay
  take_back()
  return redis.error_reply('PENSTOCK its segment is sealed')
end
local record = {'e', id, 'f', ARGV[4], 'n', ARGV[5], 'b', ARGV[6], 'h', ARGV[7]}
if ARGV[8] ~= '' then
  record[#record + 1], record[#record + 2] = 's', ARGV[8]
  redis.call('HINCRBY', KEYS[6], ARGV[8], 1)
end
if writer ~= '' then record[#record + 1], record[#record + 2] = 'w', writer end
redis.call('XADD', KEYS[2], ARGV[3] .. '-0', unpack(record))
for i = 10, #ARGV, 2 do redis.call('HSET', KEYS[5], ARGV[i], ARGV[i + 1]) end
redis.call('HINCRBY', KEYS[3], 'b:' .. ARGV[2], ARGV[6])
return redis.call('HINCRBY', KEYS[3], 'bytes', ARGV[6])
"""

ACK = (
    NOT_LIVE
    + """
-- KEYS state entries ledger.. | ARGV live_state group n id1..idn, then per ledger: m lo1 hi1 .. : bits [lo, hi)
-- The first write is always an XACK: at maxmemory a script that starts with one may go on to write (design.md 5.3).
local state = redis.call('GET', KEYS[1])
if state ~= ARGV[1] then return not_live(state) end
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
)

CLAIM = """
-- KEYS entries | ARGV group member holder min_idle_ms id deliveries : takes an entry from whom it was seen with.
-- XCLAIM alone asks for no holder: of two that claim what was handed back, the second took it from the first, and both
-- handed it out.
local held = redis.pcall('XPENDING', KEYS[1], ARGV[1], ARGV[5], ARGV[5], 1, ARGV[3])
if held.err then
  if string.find(held.err, 'NOGROUP') then return 0 end -- released since it was listed
  return held
end
if #held == 0 then return 0 end
local claim = {KEYS[1], ARGV[1], ARGV[2], ARGV[4], ARGV[5], 'RETRYCOUNT', ARGV[6], 'JUSTID'}
return #redis.call('XCLAIM', unpack(claim))
"""

BURY = (
    NOT_LIVE
    + """
-- KEYS state entries dead | ARGV live_state group id reason : a dead letter of this group, kept by its id
local state = redis.call('GET', KEYS[1])
if state ~= ARGV[1] then return not_live(state) end
redis.call('XACK', KEYS[2], ARGV[2], ARGV[3])
local now = redis.call('TIME')
now = tonumber(now[1]) * 1000 + math.floor(tonumber(now[2]) / 1000)
redis.call('HSET', KEYS[3], ARGV[3], cjson.encode({why = ARGV[4], at = now}))
return 1
"""
)

ENTRY_HEADERS = """
-- KEYS entries | ARGV most_header_bytes id.. : the header of each entry; '' where there is no such entry, '-' where it
-- has no header. No command tells of an entry without its payload: XRANGE inside a script does not send it.
local found = {}
for i = 2, #ARGV do
  local entry = redis.call('XRANGE', KEYS[1], ARGV[i], ARGV[i])[1]
  local meta = entry and entry[2][1] == 'meta' and entry[2][2]
  found[i - 1] = not entry and '' or (meta and #meta <= tonumber(ARGV[1]) and meta ~= '') and meta or '-'
end
return found
"""

NAMED = """
-- KEYS index | ARGV record_id count : record id and entry id of so many records from one on, in one string. A client
-- takes this apart in a tenth of the time that it needs for the records.
local found = {}
for _, record in ipairs(redis.call('XRANGE', KEYS[1], ARGV[1], '+', 'COUNT', ARGV[2])) do
  if record[2][1] == 'e' and record[2][2] ~= '' then found[#found + 1] = record[1] .. ' ' .. record[2][2] end
end
return table.concat(found, ' ')
"""

TRIM = (
    GO_ON
    + MARK_LOST
    + """
-- KEYS roster entries segments | ARGV gen epoch id1 bytes1 segment1 .. : XDEL of what every group has settled
-- Returns the bytes freed, -1 if the roster changed since it was read.
if (redis.call('HGET', KEYS[1], 'gen') or '0') ~= ARGV[1] then return -1 end
redis.call('HSET', KEYS[1], 't:' .. ARGV[2], '1')
mark_lost(KEYS[1], tonumber(ARGV[2]))
local freed = 0
for i = 3, #ARGV, 3 do
  if redis.call('XDEL', KEYS[2], ARGV[i]) == 1 then
    freed = freed + tonumber(ARGV[i + 1])
    if ARGV[i + 2] ~= '' then redis.call('HINCRBY', KEYS[3], ARGV[i + 2], -1) end
  end
end
-- 0 - n, because -n of 0 is '-0', which is no integer
redis.call('HINCRBY', KEYS[1], 'b:' .. ARGV[2], 0 - freed)
redis.call('HINCRBY', KEYS[1], 'bytes', 0 - freed)
return freed
"""
)

SEAL = (
    GO_ON
    + """
-- KEYS segments state | ARGV manifest_id by segment.. : they get no more entries. by 1: their writer says so, who has
-- none under way. by 2: somebody else, for a dead writer, of whom one may still come: also where none came yet.
local state = redis.call('GET', KEYS[2])
if state ~= 'live:' .. ARGV[1] and state ~= 'abandoned:' .. ARGV[1] then return 0 end
for i = 3, #ARGV do
  if ARGV[2] == '2' or redis.call('HEXISTS', KEYS[1], ARGV[i]) == 1 then
    redis.call('HSET', KEYS[1], 's:' .. ARGV[i], ARGV[2])
  end
end
return 1
"""
)

FREE_SEGMENTS = (
    GO_ON
    + """
-- KEYS segments | ARGV segment.. : takes those off that are sealed and of which no entry is left; returns them.
-- That one was sealed for a dead writer stays known: an entry of his may come later still.
local freed = {}
for i = 1, #ARGV do
  local entries, by = redis.call('HGET', KEYS[1], ARGV[i]), redis.call('HGET', KEYS[1], 's:' .. ARGV[i])
  if by and (entries == '0' or (not entries and by == '2')) then
    redis.call('HDEL', KEYS[1], ARGV[i])
    if by == '1' then redis.call('HDEL', KEYS[1], 's:' .. ARGV[i]) end
    freed[#freed + 1] = ARGV[i]
  end
end
return freed
"""
)
