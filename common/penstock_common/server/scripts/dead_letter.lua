-- Makes an entry a dead letter of a group: it is acknowledged, and its id and the reason are kept.
--
-- KEYS: state entries dead
-- ARGV: live_state group id reason
-- Answer: 1; -1 if the epoch ended
-- Callers: penstock_common/stream/groups/ledger.py

-- The epoch's state is not the one that the caller knows: -1 if it ended, an error if Penstock did not write it.
local function not_live(state)
  if not state then return -1 end
  for _, word in ipairs({'live:', 'gone:', 'abandoned:'}) do
    if string.sub(state, 1, #word) == word then return -1 end
  end
  return redis.error_reply('PENSTOCK damaged state ' .. string.format('%q', string.sub(state, 1, 40)))
end

local state = redis.call('GET', KEYS[1])
if state ~= ARGV[1] then return not_live(state) end
redis.call('XACK', KEYS[2], ARGV[2], ARGV[3])
local now = redis.call('TIME')
now = tonumber(now[1]) * 1000 + math.floor(tonumber(now[2]) / 1000)
redis.call('HSET', KEYS[3], ARGV[3], cjson.encode({why = ARGV[4], at = now}))
return 1
