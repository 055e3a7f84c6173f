-- Deletes entries that every group has acknowledged.
--
-- KEYS: roster entries segments
-- ARGV: gen epoch [id bytes segment]..
-- Answer: the bytes freed; -1 if the roster changed since the caller read it
-- Callers: penstock_common/stream/entries.py

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

if (redis.call('HGET', KEYS[1], 'gen') or '0') ~= ARGV[1] then return -1 end
redis.call('HSET', KEYS[1], 't:' .. ARGV[2], '1')
mark_lost(KEYS[1], tonumber(ARGV[2]))
local freed = 0
for i = 3, #ARGV, 3 do
  if redis.call('XDEL', KEYS[2], ARGV[i]) == 1 then
    freed = freed + tonumber(ARGV[i + 1])
    if ARGV[i + 2] ~= '' then redis.call('HINCRBY', KEYS[3], ARGV[i + 2], -1) end
  end
end
-- 0 - n, because -n is '-0' for n = 0, and Redis takes that for no integer
redis.call('HINCRBY', KEYS[1], 'b:' .. ARGV[2], 0 - freed)
redis.call('HINCRBY', KEYS[1], 'bytes', 0 - freed)
return freed
