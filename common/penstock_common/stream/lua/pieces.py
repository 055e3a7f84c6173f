"""Pieces that several Lua scripts begin with. The scripts themselves lie beside this file.

All are short, move ids and counters only, and name only keys they are given.
"""

from __future__ import annotations

GO_ON = """
redis.call('HDEL', KEYS[1], '')
"""
"""What releases, renews or completes must not fail at maxmemory: a script whose first write is one that frees memory
may go on to write (design.md 5.3)."""

NOT_LIVE = """
local function not_live(state)
  if not state then return -1 end
  for _, word in ipairs({'live:', 'gone:', 'abandoned:'}) do
    if string.sub(state, 1, #word) == word then return -1 end
  end
  return redis.error_reply('PENSTOCK damaged state ' .. string.format('%q', string.sub(state, 1, 40)))
end
"""
"""The answer for an epoch whose state is not the one that the caller knows: -1, or an error where no Penstock wrote it.
A reader that took such an epoch for an ended one would be given the same samples again and again."""

DECODED = """
local function decoded(text, field)
  local value = cjson.decode(text)
  if type(value) ~= 'table' then error('Expected an object, found ' .. string.sub(text, 1, 40)) end
  if field and type(value[field]) ~= 'string' then
    error('Expected an object with ' .. field .. ', found ' .. string.sub(text, 1, 40))
  end
  return value
end
"""
"""Decodes a record of a roster, and ends the script where it is none: Lua takes a field of a string for nil."""

MARK_LOST = """
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

MINIMUM = """
local function minimum(positions, world)
  local floor, low = tonumber(redis.call('HGET', positions, 'floor') or '0'), nil
  for rank = 0, world - 1 do
    local at = tonumber(redis.call('HGET', positions, tostring(rank)) or floor)
    if not low or at < low then low = at end
  end
  return low or floor
end
"""
"""What every rank of an ordered group has settled of an epoch: all below the lowest position."""
