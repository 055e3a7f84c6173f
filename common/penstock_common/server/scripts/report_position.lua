-- A rank of an ordered group has acknowledged everything below a position. The first write frees, so that reports
-- continue at maxmemory.
--
-- KEYS: roster state positions
-- ARGV: live_state group rank incarnation position
-- Answer: 1; 0 if the position is not higher than the known one; -1 if the epoch ended
-- Callers: penstock_common/stream/groups/positions.py

-- The epoch's state is not the one that the caller knows: -1 if it ended, an error if Penstock did not write it.
local function not_live(state)
  if not state then return -1 end
  for _, word in ipairs({'live:', 'gone:', 'abandoned:'}) do
    if string.sub(state, 1, #word) == word then return -1 end
  end
  return redis.error_reply('PENSTOCK damaged state ' .. string.format('%q', string.sub(state, 1, 40)))
end

-- Decodes a record of the roster. Lua takes a field of a string for nil, so the type is checked first.
local function decoded(text, field)
  local value = cjson.decode(text)
  if type(value) ~= 'table' then error('Expected an object, found ' .. string.sub(text, 1, 40)) end
  if field and type(value[field]) ~= 'string' then
    error('Expected an object with ' .. field .. ', found ' .. string.sub(text, 1, 40))
  end
  return value
end

-- Why this rank may not report: its group is gone, has fewer ranks, or another process has the rank.
local function refusal(roster, group, rank, incarnation)
  local text = redis.call('HGET', roster, 'g:' .. group)
  if not text then return 'PENSTOCK gone' end
  local record = decoded(text)
  if tonumber(rank) >= (record.world or 0) then return 'PENSTOCK rank ' .. (record.world or 0) end
  local member = redis.call('HGET', roster, 'm:' .. group .. ':rank-' .. rank)
  if not member or decoded(member, 'inc').inc ~= incarnation then return 'PENSTOCK replaced' end
end

local state = redis.call('GET', KEYS[2])
if state ~= ARGV[1] then return not_live(state) end
redis.call('HDEL', KEYS[1], '') -- the first write frees, so that the server permits the next at maxmemory
local no = refusal(KEYS[1], ARGV[2], ARGV[3], ARGV[4])
if no then return redis.error_reply(no) end
local at = redis.call('HGET', KEYS[3], ARGV[3]) or redis.call('HGET', KEYS[3], 'floor') or '0'
if tonumber(ARGV[5]) <= tonumber(at) then return 0 end
redis.call('HSET', KEYS[3], ARGV[3], ARGV[5])
return 1
