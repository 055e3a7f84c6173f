-- An operator decides that a group no longer needs these samples. The id is '' where there is no entry. The first
-- write is an XACK, which frees memory: a script that starts with one may continue at maxmemory.
--
-- KEYS: state entries dead ledger
-- ARGV: live_state group id field value n [low high]..
-- Answer: 1; -1 if the epoch ended
-- Callers: penstock_common/stream/mending/drop.py

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
redis.call('XACK', KEYS[2], ARGV[2], '0-0')
if ARGV[3] ~= '' then redis.call('XACK', KEYS[2], ARGV[2], ARGV[3]) end
redis.call('HSET', KEYS[3], ARGV[4], ARGV[5])
for i = 7, 5 + 2 * tonumber(ARGV[6]), 2 do
  for offset = tonumber(ARGV[i]), tonumber(ARGV[i + 1]) - 1 do redis.call('SETBIT', KEYS[4], offset, 1) end
end
return 1
