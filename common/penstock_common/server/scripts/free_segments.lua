-- Removes sealed segments without entries from the registry. The seal that stands for a dead writer stays, because an
-- entry of that writer may still come.
--
-- KEYS: segments
-- ARGV: segment..
-- Answer: the names of the removed segments
-- Callers: penstock_common/stream/payloads.py

redis.call('HDEL', KEYS[1], '') -- the first write frees, so that the server permits the next at maxmemory

local freed = {}
for i = 1, #ARGV do
  local entries, by = redis.call('HGET', KEYS[1], ARGV[i]), redis.call('HGET', KEYS[1], 's:' .. ARGV[i])
  if by and (entries == '0' or (not entries and by == '2')) then
    redis.call('HDEL', KEYS[1], ARGV[i])
    if by == '1' then redis.call('HDEL', KEYS[1], 's:' .. ARGV[i]) end
    freed[#freed + 1] = ARGV[i]
  end
end
return freed
