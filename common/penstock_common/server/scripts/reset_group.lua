-- A group reads again from the epoch `first`. The generation rises, so that a release or trim that was planned before
-- is refused.
--
-- KEYS: roster entries..
-- ARGV: group first epoch..
-- Answer: 1
-- Callers: penstock_common/stream/groups/forgetting.py

redis.call('HDEL', KEYS[1], '') -- the first write frees, so that the server permits the next at maxmemory

local text = redis.call('HGET', KEYS[1], 'g:' .. ARGV[1])
if not text then return redis.error_reply('PENSTOCK no group') end
local record = cjson.decode(text)
record.first, record.lost = tonumber(ARGV[2]), nil
redis.call('HSET', KEYS[1], 'g:' .. ARGV[1], cjson.encode(record))
redis.call('HINCRBY', KEYS[1], 'gen', 1)
for i = 3, #ARGV do
  redis.call('HDEL', KEYS[1], 'd:' .. ARGV[1] .. ':' .. ARGV[i])
  redis.pcall('XGROUP', 'DESTROY', KEYS[i - 1], ARGV[1])
  if tonumber(ARGV[i]) >= record.first and record.kind == 'shared' then
    redis.call('XGROUP', 'CREATE', KEYS[i - 1], ARGV[1], '0')
  end
end
return 1
