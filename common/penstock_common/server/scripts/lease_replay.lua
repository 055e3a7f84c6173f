-- Holds an epoch for a replay, or renews the lease. With a new lease the generation rises, so that a release or trim
-- that was planned before is refused.
--
-- KEYS: roster
-- ARGV: token epoch ttl_ms must_exist
-- Answer: 1; 0 if the epoch is gone or the lease has lapsed
-- Callers: penstock_common/stream/groups/roster.py

redis.call('HDEL', KEYS[1], '') -- the first write frees, so that the server permits the next at maxmemory

if redis.call('HEXISTS', KEYS[1], 'e:' .. ARGV[2]) == 0 then return 0 end
local now = redis.call('TIME')
now = tonumber(now[1]) * 1000 + math.floor(tonumber(now[2]) / 1000)
if ARGV[4] == '1' then
  local text = redis.call('HGET', KEYS[1], 'r:' .. ARGV[1])
  if not text or cjson.decode(text).till < now then return 0 end
elseif redis.call('HEXISTS', KEYS[1], 'r:' .. ARGV[1]) == 0 then
  redis.call('HINCRBY', KEYS[1], 'gen', 1)
end
redis.call('HSET', KEYS[1], 'r:' .. ARGV[1], cjson.encode({epoch = tonumber(ARGV[2]), till = now + tonumber(ARGV[3])}))
return 1
