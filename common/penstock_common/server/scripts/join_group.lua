-- Joins a member to a group, or declares a group without a member. The keys are those of each epoch: its entries, or
-- of an ordered group its positions. An empty member declares only. An empty kind accepts the kind that the group
-- has. world and batch are 0 where the caller does not know them. With look_only nothing is written, and no epoch need be
-- known. With force a group that lost epochs goes on without them: behind the last of those that was trimmed.
--
-- KEYS: roster key..
-- ARGV: group member incarnation declared first raise force kind world batch quiet_ms look_only epoch..
-- Answer: {'joined', first, was_new}; or {'epochs'} if the caller did not know every epoch, {'lost', low, high},
--   {'kind', found}, {'batch', found}, {'busy', world, member..}
-- Callers: penstock_common/stream/groups/roster.py

redis.call('HDEL', KEYS[1], '') -- the first write frees, so that the server permits the next at maxmemory

-- What all ranks have acknowledged: everything below the lowest position.
local function minimum(positions, world)
  local floor, low = tonumber(redis.call('HGET', positions, 'floor') or '0'), nil
  for rank = 0, world - 1 do
    local at = tonumber(redis.call('HGET', positions, tostring(rank)) or floor)
    if not low or at < low then low = at end
  end
  return low or floor
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

local group, member, incarnation, declared = ARGV[1], ARGV[2], ARGV[3], ARGV[4] == '1'
local first, raise, force = tonumber(ARGV[5]), ARGV[6] == '1', ARGV[7] == '1'
local kind, world, batch, quiet_ms = ARGV[8], tonumber(ARGV[9]), tonumber(ARGV[10]), tonumber(ARGV[11])
local look_only = ARGV[12] == '1'
local given, lowest, whole = {}, nil, 0
for i = 13, #ARGV do given[ARGV[i]] = KEYS[i - 11] end
local all = redis.call('HGETALL', KEYS[1])
for i = 1, #all, 2 do
  local kind, rest = string.sub(all[i], 1, 2), string.sub(all[i], 3)
  if kind == 'e:' then
    if not given[rest] and not look_only then return {'epochs'} end
    if not lowest or tonumber(rest) < lowest then lowest = tonumber(rest) end
  elseif kind == 't:' then whole = math.max(whole, tonumber(rest) + 1) end
end
local now = redis.call('TIME')
now = tonumber(now[1]) * 1000 + math.floor(tonumber(now[2]) / 1000)
local text = redis.call('HGET', KEYS[1], 'g:' .. group)
local record, new = nil, 0
if text then
  record = decoded(text)
  if kind ~= '' and record.kind ~= kind then return {'kind', record.kind} end
  if batch > 0 and (record.batch or batch) ~= batch then return {'batch', record.batch} end
  if record.lost and not force then return {'lost', record.lost[1], record.lost[2]} end
  if raise then record.first = math.max(record.first, first) end
  -- an epoch that was lost in part is still there, and would end with samples that nobody can give
  for i = 1, record.lost and #all or 0, 2 do
    local epoch = tonumber(string.match(all[i], '^t:(%d+)$'))
    if epoch and epoch >= record.lost[1] and epoch <= record.lost[2]
        and redis.call('HEXISTS', KEYS[1], 'd:' .. group .. ':' .. epoch) == 0 then
      record.first = math.max(record.first, epoch + 1)
    end
  end
else
  new = 1
  record = {kind = kind == '' and 'shared' or kind, first = math.max(first, whole, lowest or 0), declared = false}
end
local is_other, old = world > 0 and (record.world or world) ~= world, {}
if is_other then -- the number of ranks may change once all old ones are gone
  local prefix, busy = 'm:' .. group .. ':', {'busy', record.world}
  for i = 1, #all, 2 do
    if string.sub(all[i], 1, #prefix) == prefix then
      local one, is_namesake = cjson.decode(all[i + 1]), all[i] == prefix .. member
      if not is_namesake then old[#old + 1] = all[i] end
      local is_self = is_namesake and one.inc == incarnation
      if one.seen > now - quiet_ms and not is_self then busy[#busy + 1] = string.sub(all[i], #prefix + 1) end
    end
  end
  if #busy > 2 then return busy end
end
if look_only then return {'joined', record.first, new} end
if is_other then
  for _, field in ipairs(old) do redis.call('HDEL', KEYS[1], field) end
  for _, key in pairs(given) do
    local floor = minimum(key, record.world)
    redis.call('DEL', key)
    if floor > 0 then redis.call('HSET', key, 'floor', floor) end
  end
end
if world > 0 then record.world, record.batch = world, batch end
record.lost = nil
record.declared = record.declared or declared
if not record.holds then redis.call('HINCRBY', KEYS[1], 'gen', 1) end
record.holds, record.seen = true, now
redis.call('HSET', KEYS[1], 'g:' .. group, cjson.encode(record))
if member ~= '' then
  local name, mine = group .. ':' .. member, cjson.encode({inc = incarnation, seen = now})
  local before = redis.call('HGET', KEYS[1], 'm:' .. name)
  if before and decoded(before, 'inc').inc ~= incarnation then -- the process before it may live, and must learn of it
    redis.call('HSET', KEYS[1], 'o:' .. name, mine)
  end
  redis.call('HSET', KEYS[1], 'm:' .. name, mine)
end
for epoch, key in pairs(given) do -- one that was released since the caller read the roster has no entries
  local is_there = redis.call('HEXISTS', KEYS[1], 'e:' .. epoch) == 1
  if is_there and tonumber(epoch) >= record.first and record.kind == 'shared' then
    local made = redis.pcall('XGROUP', 'CREATE', key, group, '0')
    if made.err and not string.find(made.err, 'BUSYGROUP') then return made end
  end
end
return {'joined', record.first, new}
