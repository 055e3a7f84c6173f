"""The Lua of repairs and of operators' words: a repair's record, a dead letter given back, something given up.

Called by ``repairs`` and ``bad``. Ids, counters and bits, never a payload.
"""

from __future__ import annotations

from penstock_common.stream.lua.pieces import GO_ON, NOT_LIVE

REPAIR = """
-- KEYS entries target roster | ARGV epoch record_id first count bytes holes found : runs right after the XADD in one
-- MULTI, as COMMIT does. target is the shard's index where the record goes at its end, else its repairs key.
-- found: id of an entry that is there and that no record named; then nothing was appended.
local function last()
  for _, group in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
    for i = 1, #group, 2 do
      if group[i] == 'name' and group[i + 1] == '_last' then
        for j = 1, #group, 2 do if group[j] == 'last-delivered-id' then return group[j + 1] end end
      end
    end
  end
end
local id, bytes = ARGV[7], ARGV[5]
if id == '' and tonumber(ARGV[4]) > 0 then
  local before = last()
  redis.call('XGROUP', 'SETID', KEYS[1], '_last', '$')
  id = last()
  if id == before then return redis.error_reply('PENSTOCK nothing was appended') end
  redis.call('HINCRBY', KEYS[3], 'b:' .. ARGV[1], bytes)
  redis.call('HINCRBY', KEYS[3], 'bytes', bytes)
end
redis.call('XADD', KEYS[2], ARGV[2], 'e', id, 'f', ARGV[3], 'n', ARGV[4], 'b', bytes, 'h', ARGV[6])
return id
"""

BALANCE = (
    GO_ON
    + """
-- KEYS roster | ARGV epoch counted held : corrects the bytes of an epoch, if they are still those that were compared
if (redis.call('HGET', KEYS[1], 'b:' .. ARGV[1]) or '0') ~= ARGV[2] then return 0 end
redis.call('HINCRBY', KEYS[1], 'b:' .. ARGV[1], tonumber(ARGV[3]) - tonumber(ARGV[2]))
redis.call('HINCRBY', KEYS[1], 'bytes', tonumber(ARGV[3]) - tonumber(ARGV[2]))
return 1
"""
)

REOPEN = (
    GO_ON
    + """
-- KEYS roster | ARGV group epoch : the group owes the epoch again; a release or trim planned before is refused
if redis.call('HEXISTS', KEYS[1], 'g:' .. ARGV[1]) == 0 or redis.call('HEXISTS', KEYS[1], 'e:' .. ARGV[2]) == 0 then
  return 0
end
redis.call('HDEL', KEYS[1], 'd:' .. ARGV[1] .. ':' .. ARGV[2])
redis.call('HINCRBY', KEYS[1], 'gen', 1)
return 1
"""
)

RETRY = (
    NOT_LIVE
    + """
-- KEYS state entries dead | ARGV live_state group id : a dead letter becomes pending again, free for any member
local state = redis.call('GET', KEYS[1])
if state ~= ARGV[1] then return not_live(state) end
if redis.call('HEXISTS', KEYS[3], ARGV[3]) == 0 or #redis.call('XRANGE', KEYS[2], ARGV[3], ARGV[3]) == 0 then
  return 0
end
local claimed = redis.call('XCLAIM', KEYS[2], ARGV[2], '~released', 0, ARGV[3], 'RETRYCOUNT', 1, 'FORCE', 'JUSTID')
if #claimed == 0 then return 0 end
redis.call('HDEL', KEYS[3], ARGV[3])
return 1
"""
)

GIVE_UP = (
    NOT_LIVE
    + """
-- KEYS state entries dead ledger | ARGV live_state group id field value n lo1 hi1 .. : an operator's word that these
-- samples are not owed to the group any more. id '' = there is no entry. The first write is an XACK, see ACK.
local state = redis.call('GET', KEYS[1])
if state ~= ARGV[1] then return not_live(state) end
redis.call('XACK', KEYS[2], ARGV[2], '0-0')
if ARGV[3] ~= '' then redis.call('XACK', KEYS[2], ARGV[2], ARGV[3]) end
redis.call('HSET', KEYS[3], ARGV[4], ARGV[5])
for i = 7, 5 + 2 * tonumber(ARGV[6]), 2 do
  for offset = tonumber(ARGV[i]), tonumber(ARGV[i + 1]) - 1 do redis.call('SETBIT', KEYS[4], offset, 1) end
end
return 1
"""
)

SHOW = """
-- KEYS entries | ARGV id most_header_bytes : {header, name1, bytes1, ..} of one entry, payloads stay; {} if it is gone
local entry = redis.call('XRANGE', KEYS[1], ARGV[1], ARGV[1])[1]
if not entry then return {} end
local fields, found = entry[2], {''}
if fields[1] == 'meta' and #fields[2] <= tonumber(ARGV[2]) then found[1] = fields[2] end
for i = 1, #fields, 2 do
  found[#found + 1] = string.sub(fields[i], 1, 200)
  found[#found + 1] = #fields[i + 1]
end
return found
"""
