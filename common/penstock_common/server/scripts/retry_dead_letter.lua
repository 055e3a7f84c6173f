-- Makes a dead letter pending again, so that any member may claim it.
--
-- KEYS: state entries dead
-- ARGV: live_state group id
-- Answer: 1; 0 if there is no such dead letter or entry; -1 if the epoch ended
-- Callers: penstock_common/stream/mending/bad.py

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
if redis.call('HEXISTS', KEYS[3], ARGV[3]) == 0 or #redis.call('XRANGE', KEYS[2], ARGV[3], ARGV[3]) == 0 then
  return 0
end
local claimed = redis.call('XCLAIM', KEYS[2], ARGV[2], '~released', 0, ARGV[3], 'RETRYCOUNT', 1, 'FORCE', 'JUSTID')
if #claimed == 0 then return 0 end
redis.call('HDEL', KEYS[3], ARGV[3])
return 1
