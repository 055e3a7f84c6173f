"""The Lua of paces: what workers, trainers and fleets say of themselves, and the end of what nobody says any more.

Who calls it, and what a pace means, is ``stream.paces``'s.
"""

from __future__ import annotations

from penstock_common.stream.lua.pieces import GO_ON

TELL_PACE = (
    GO_ON
    + """
-- KEYS paces meta | ARGV stream_id field value sweep_ms : says it, as of now; with sweep_ms > 0 forgets who is silent
-- Refused (0) once this life of the stream is over: nobody would take the key away.
if redis.call('HGET', KEYS[2], 'id') ~= ARGV[1] or redis.call('HEXISTS', KEYS[2], 'deleting') == 1 then return 0 end
local now = redis.call('TIME')
now = tonumber(now[1]) * 1000 + math.floor(tonumber(now[2]) / 1000)
local said = cjson.decode(ARGV[3])
said.seen = now
redis.call('HSET', KEYS[1], ARGV[2], cjson.encode(said))
if tonumber(ARGV[4]) > 0 then
  local all = redis.call('HGETALL', KEYS[1])
  for i = 1, #all, 2 do
    if cjson.decode(all[i + 1]).seen < now - tonumber(ARGV[4]) then redis.call('HDEL', KEYS[1], all[i]) end
  end
end
return 1
"""
)
