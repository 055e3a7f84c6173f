-- The first step of a release: takes the epoch off the roster. The caller unlinks the keys of the epoch after it.
--
-- KEYS: roster state
-- ARGV: gen epoch manifest_id [unused]; gen '' accepts any roster. unused is 1 if the caller found that nothing was
--   committed to the epoch in any partition: then no group has lost it, unless this partition has a commit
-- Answer: the bytes that the epoch held; 0 if the roster does not have the epoch of this manifest; -1 if the roster
--   changed since the caller read it
-- Callers: penstock_common/stream/removal/deletion.py

redis.call('HDEL', KEYS[1], '') -- the first write frees, so that the server permits the next at maxmemory

-- Notes the epoch as lost in every group that may read it, holds no data and is not done with it.
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

-- Notes the epoch among those that were released here. A roster that lost an epoch has no such note of it.
local function mark_retired(roster, epoch)
  local text = redis.call('HGET', roster, 'retired') or ''
  local before, low, high = string.match(text, '^(.-)(%d+)%-(%d+)$')
  if high and tonumber(high) + 1 == epoch then
    text = before .. low .. '-' .. epoch
  else
    text = text .. (text == '' and '' or ',') .. epoch .. '-' .. epoch
  end
  redis.call('HSET', roster, 'retired', text)
end

if ARGV[1] ~= '' and (redis.call('HGET', KEYS[1], 'gen') or '0') ~= ARGV[1] then return -1 end
if redis.call('HGET', KEYS[1], 'e:' .. ARGV[2]) ~= ARGV[3] then return 0 end
redis.call('SET', KEYS[2], 'gone:' .. ARGV[3])
if ARGV[4] ~= '1' or redis.call('HEXISTS', KEYS[1], 'b:' .. ARGV[2]) == 1 then
  mark_lost(KEYS[1], tonumber(ARGV[2]))
end
mark_retired(KEYS[1], tonumber(ARGV[2]))
local bytes = tonumber(redis.call('HGET', KEYS[1], 'b:' .. ARGV[2]) or '0')
redis.call('HINCRBY', KEYS[1], 'bytes', 0 - bytes)
redis.call('HDEL', KEYS[1], 'e:' .. ARGV[2], 't:' .. ARGV[2], 'b:' .. ARGV[2], 'p:' .. ARGV[2])
redis.call('HSET', KEYS[1], 'x:' .. ARGV[2], ARGV[3])
for _, field in ipairs(redis.call('HKEYS', KEYS[1])) do
  if string.sub(field, 1, #ARGV[2] + 3) == 'w:' .. ARGV[2] .. ':' then redis.call('HDEL', KEYS[1], field) end
  if string.sub(field, 1, 2) == 'd:' and string.sub(field, -#ARGV[2] - 1) == ':' .. ARGV[2] then
    redis.call('HDEL', KEYS[1], field)
    local name = string.sub(field, 3, -#ARGV[2] - 2)
    local text = redis.call('HGET', KEYS[1], 'g:' .. name)
    if text then
      local record = cjson.decode(text)
      record.read = math.max(record.read or -1, tonumber(ARGV[2]))
      redis.call('HSET', KEYS[1], 'g:' .. name, cjson.encode(record))
    end
  end
end
return bytes
