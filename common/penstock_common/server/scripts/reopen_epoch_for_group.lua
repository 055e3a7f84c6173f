-- A group needs an epoch again. A release or trim that was planned before is refused.
--
-- KEYS: roster
-- ARGV: group epoch
-- Answer: 1; 0 if there is no such group or epoch
-- Callers: penstock_common/stream/groups/roster.py

redis.call('HDEL', KEYS[1], '') -- the first write frees, so that the server permits the next at maxmemory

if redis.call('HEXISTS', KEYS[1], 'g:' .. ARGV[1]) == 0 or redis.call('HEXISTS', KEYS[1], 'e:' .. ARGV[2]) == 0 then
  return 0
end
redis.call('HDEL', KEYS[1], 'd:' .. ARGV[1] .. ':' .. ARGV[2])
redis.call('HINCRBY', KEYS[1], 'gen', 1)
return 1
