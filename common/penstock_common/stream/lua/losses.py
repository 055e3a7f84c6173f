"""The Lua of notes on what a server lost. Called by ``losses``."""

from __future__ import annotations

from penstock_common.stream.lua.pieces import GO_ON

NOTE_LOSS = (
    GO_ON
    + """
-- KEYS hash | ARGV id most field note : notes a loss once, in a manifest or a stream's meta, if the hash has this id.
-- Returns 1 where the note is there, 0 where the hash is another one, -1 where it has `most` notes already.
if redis.call('HGET', KEYS[1], 'id') ~= ARGV[1] then return 0 end
if redis.call('HEXISTS', KEYS[1], ARGV[3]) == 1 then return 1 end
local noted = 0
for _, field in ipairs(redis.call('HKEYS', KEYS[1])) do
  if string.sub(field, 1, 5) == 'lost:' then noted = noted + 1 end
end
if noted >= tonumber(ARGV[2]) then return -1 end
redis.call('HSET', KEYS[1], ARGV[3], ARGV[4])
return 1
"""
)
