"""The Lua of ordered groups: reporting how far a rank is, and taking one back. Positions only.

Joining is ``groups``'; who calls these, and what their replies mean, is ``stream.positions``'.
"""

from __future__ import annotations

from penstock_common.stream.lua.pieces import DECODED, MINIMUM, NOT_LIVE

_REQUIRE_RANK = (
    DECODED
    + """
local function refusal(roster, group, rank, incarnation)
  local text = redis.call('HGET', roster, 'g:' .. group)
  if not text then return 'PENSTOCK gone' end
  local record = decoded(text)
  if tonumber(rank) >= (record.world or 0) then return 'PENSTOCK rank ' .. (record.world or 0) end
  local member = redis.call('HGET', roster, 'm:' .. group .. ':rank-' .. rank)
  if not member or decoded(member, 'inc').inc ~= incarnation then return 'PENSTOCK replaced' end
end
"""
)

REPORT = (
    NOT_LIVE
    + _REQUIRE_RANK
    + """
-- KEYS roster state positions | ARGV live_state group rank incarnation position : everything of this rank below it is
-- settled. The first write frees, so that reports go on at maxmemory (design.md 5.3).
local state = redis.call('GET', KEYS[2])
if state ~= ARGV[1] then return not_live(state) end
redis.call('HDEL', KEYS[1], '')
local no = refusal(KEYS[1], ARGV[2], ARGV[3], ARGV[4])
if no then return redis.error_reply(no) end
local at = redis.call('HGET', KEYS[3], ARGV[3]) or redis.call('HGET', KEYS[3], 'floor') or '0'
if tonumber(ARGV[5]) <= tonumber(at) then return 0 end
redis.call('HSET', KEYS[3], ARGV[3], ARGV[5])
return 1
"""
)

REWIND = (
    _REQUIRE_RANK
    + MINIMUM
    + """
-- KEYS roster state positions | ARGV live_state group rank incarnation epoch position look_only settled
-- settled is what the group had settled, as the first partition said; -1 for that one, which alone has positions.
-- Returns {'gone'}, {'trimmed'} where what is below that may be removed already, or {'ok'}, each with settled. The
-- generation rises, so that a removal that was planned before is refused.
if redis.call('GET', KEYS[2]) ~= ARGV[1] then return {'gone', 0} end
redis.call('HDEL', KEYS[1], '')
local no = refusal(KEYS[1], ARGV[2], ARGV[3], ARGV[4])
if no then return redis.error_reply(no) end
local record, settled, first = cjson.decode(redis.call('HGET', KEYS[1], 'g:' .. ARGV[2])), tonumber(ARGV[8]), false
if settled < 0 then settled, first = minimum(KEYS[3], record.world), true end
if redis.call('HEXISTS', KEYS[1], 't:' .. ARGV[5]) == 1 and tonumber(ARGV[6]) < settled then
  return {'trimmed', settled}
end
redis.call('HINCRBY', KEYS[1], 'gen', 1)
if ARGV[7] == '1' then return {'ok', settled} end
if first then redis.call('HSET', KEYS[3], ARGV[3], ARGV[6]) end
redis.call('HDEL', KEYS[1], 'd:' .. ARGV[2] .. ':' .. ARGV[5])
if record.first > tonumber(ARGV[5]) then
  record.first = tonumber(ARGV[5])
  redis.call('HSET', KEYS[1], 'g:' .. ARGV[2], cjson.encode(record))
end
return {'ok', settled}
"""
)
