"""The Lua of waiting for room: a writer's note on its partition's roster, made at maxmemory too.

Who calls it, and what the note means, is ``waiters``'s.
"""

from __future__ import annotations

from penstock_common.stream.lua.pieces import GO_ON

NOTE_WAIT = (
    GO_ON
    + """
-- KEYS roster | ARGV epoch shard waited_ms need held why is_next : a writer of that shard waits for room; returns since
-- Refused (0) once the partition does not know the epoch: nobody would take the note away.
if redis.call('HEXISTS', KEYS[1], 'e:' .. ARGV[1]) == 0 then return 0 end
local now = redis.call('TIME')
now = tonumber(now[1]) * 1000 + math.floor(tonumber(now[2]) / 1000)
local note = {since = now - tonumber(ARGV[3]), seen = now, need = tonumber(ARGV[4]), held = tonumber(ARGV[5]),
  why = ARGV[6], next = ARGV[7] == '1'}
redis.call('HSET', KEYS[1], 'w:' .. ARGV[1] .. ':' .. ARGV[2], cjson.encode(note))
return note.since
"""
)
