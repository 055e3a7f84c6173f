"""The Lua of a stream's life: numbers and settings only while it is there, pins, and consumers that are gone.

Called by ``streams``, ``manifest``, ``pins`` and ``roster``, which say what the replies mean.
"""

from __future__ import annotations

from penstock_common.stream.lua.pieces import GO_ON

_IS_THERE = """
local found = redis.call('HMGET', KEYS[1], 'id', 'deleting')
if found[1] ~= ARGV[1] or found[2] then return -1 end
"""
"""A stream that is deleted under its users must not come back as half a meta."""

SET_IF_THERE = (
    _IS_THERE
    + """
-- KEYS meta | ARGV stream_id field value
redis.call('HSET', KEYS[1], ARGV[2], ARGV[3])
return 1
"""
)

FIX_SPEC = (
    _IS_THERE
    + """
-- KEYS meta | ARGV stream_id spec : the first one's stays; returns the spec there is
local known = redis.call('HGET', KEYS[1], 'spec')
if known and known ~= '' then return known end
redis.call('HSET', KEYS[1], 'spec', ARGV[2])
return ARGV[2]
"""
)

RESERVE_EPOCH = (
    _IS_THERE
    + """
-- KEYS meta | ARGV stream_id epoch : jobs open the same epoch at the same time, so the counter is raised in one step
-- epoch '' takes the next one. Returns the number reserved.
local following = tonumber(redis.call('HGET', KEYS[1], 'next_epoch') or '0')
local epoch = tonumber(ARGV[2]) or following
if following <= epoch then redis.call('HSET', KEYS[1], 'next_epoch', epoch + 1) end
return epoch
"""
)

BEGIN_MANIFEST = (
    _IS_THERE
    + """
-- KEYS meta manifest epochs | ARGV stream_id epoch state field value.. : the first one's fields stay, whole; 0 for
-- an epoch that was released: who stood still meanwhile must not bring it back, or groups would read it again.
local epoch = tonumber(ARGV[2])
for range in string.gmatch(redis.call('HGET', KEYS[1], 'released') or '', '[^,]+') do
  local low, high = string.match(range, '^(%d+)%-?(%d*)$')
  if epoch >= tonumber(low) and epoch <= tonumber(high == '' and low or high) then return 0 end
end
for i = 4, #ARGV, 2 do redis.call('HSETNX', KEYS[2], ARGV[i], ARGV[i + 1]) end
redis.call('HSETNX', KEYS[3], ARGV[2], ARGV[3])
return 1
"""
)

MARK_DELETING = """
-- KEYS meta | ARGV stream_id now_ms
if redis.call('HGET', KEYS[1], 'id') ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'deleting', ARGV[2])
return 1
"""

PIN = (
    GO_ON
    + """
-- KEYS roster | ARGV epoch : keeps the epoch until it is unpinned. 'gone' or 'trimmed' where there is nothing whole to
-- keep. The generation rises, so that a removal planned before is refused.
if redis.call('HEXISTS', KEYS[1], 'e:' .. ARGV[1]) == 0 then return 'gone' end
if redis.call('HEXISTS', KEYS[1], 't:' .. ARGV[1]) == 1 then return 'trimmed' end
local now = redis.call('TIME')
now = tonumber(now[1]) * 1000 + math.floor(tonumber(now[2]) / 1000)
if redis.call('HSETNX', KEYS[1], 'p:' .. ARGV[1], now) == 0 then return 'known' end
redis.call('HINCRBY', KEYS[1], 'gen', 1)
return 'pinned'
"""
)

FORGET_CONSUMERS = """
-- KEYS entries.. | ARGV group member : a member that is gone leaves no consumer behind; one with pending entries stays,
-- since they would be lost with it
local gone = 0
for i = 1, #KEYS do
  local pending = redis.pcall('XPENDING', KEYS[i], ARGV[1], '-', '+', 1, ARGV[2])
  if not pending.err and #pending == 0 then
    local done = redis.pcall('XGROUP', 'DELCONSUMER', KEYS[i], ARGV[1], ARGV[2])
    if type(done) == 'number' then gone = gone + 1 end
  end
end
return gone
"""
