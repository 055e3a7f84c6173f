-- Acknowledges entries of a group, and sets the bits of their samples in the group's ledgers. The first write is
-- always an XACK, which frees memory: a script that starts with one may continue at maxmemory.
--
-- KEYS: state entries ledger..
-- ARGV: live_state group n id1..idn, then for each ledger: m [low high].., the bits from low to below high
-- Answer: n; -1 if the epoch ended
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
local n, at = tonumber(ARGV[3]), 4
redis.call('XACK', KEYS[2], ARGV[2], '0-0')
at = at + n
for k = 3, #KEYS do
  local m = tonumber(ARGV[at])
  for r = 0, m - 1 do
    local lo, hi = tonumber(ARGV[at + 1 + 2 * r]), tonumber(ARGV[at + 2 + 2 * r])
    while lo < hi and lo % 8 ~= 0 do redis.call('SETBIT', KEYS[k], lo, 1) lo = lo + 1 end
    while hi > lo and hi % 8 ~= 0 do hi = hi - 1 redis.call('SETBIT', KEYS[k], hi, 1) end
    if hi > lo then redis.call('SETRANGE', KEYS[k], lo / 8, string.rep('\255', (hi - lo) / 8)) end
  end
  at = at + 1 + 2 * m
end
-- last, so that the entries are delivered again if the server refuses a bit
for i = 4, 3 + n do redis.call('XACK', KEYS[2], ARGV[2], ARGV[i]) end
return n
