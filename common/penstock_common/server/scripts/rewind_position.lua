-- Takes a rank back to an earlier position. `settled` is what the group had acknowledged, as the first partition
-- said; it is -1 for the first partition, which alone has positions. The generation rises, so that a removal that was
-- planned before is refused.
--
-- KEYS: roster state positions
-- ARGV: live_state group rank incarnation epoch position look_only settled
-- Answer: {'ok', settled}; {'gone', 0} if the epoch is gone; {'trimmed', settled} if entries below may be removed
--   already
-- Callers: penstock_common/stream/groups/positions.py

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

-- What all ranks have acknowledged: everything below the lowest position.
local function minimum(positions, world)
  local floor, low = tonumber(redis.call('HGET', positions, 'floor') or '0'), nil
  for rank = 0, world - 1 do
    local at = tonumber(redis.call('HGET', positions, tostring(rank)) or floor)
    if not low or at < low then low = at end
  end
  return low or floor
end

if redis.call('GET', KEYS[2]) ~= ARGV[1] then return {'gone', 0} end
redis.call('HDEL', KEYS[1], '') -- the first write frees, so that the server permits the next at maxmemory
local no = refusal(KEYS[1], ARGV[2], ARGV[3], ARGV[4])
if no then return redis.error_reply(no) end
local record, settled, first = cjson.decode(redis.call('HGET', KEYS[1], 'g:' .. ARGV[2])), tonumber(ARGV[8]), false
if settled < 0 then settled, first = minimum(KEYS[3], record.world), true end
if redis.call('HEXISTS', KEYS[1], 't:' .. ARGV[5]) == 1 and tonumber(ARGV[6]) < settled then
  return {'trimmed', settled}
end
redis.call('HINCRBY', KEYS[1], 'gen', 1)
if ARGV[7] == '1' then return {'ok', settled} end
if first then redis.call('HSET', KEYS[3], ARGV[3], ARGV[6]) end
redis.call('HDEL', KEYS[1], 'd:' .. ARGV[2] .. ':' .. ARGV[5])
if record.first > tonumber(ARGV[5]) then
  record.first = tonumber(ARGV[5])
  redis.call('HSET', KEYS[1], 'g:' .. ARGV[2], cjson.encode(record))
end
return {'ok', settled}
