-- Keeps an epoch until somebody unpins it. The generation rises, so that a removal that was planned before is
-- refused.
--
-- KEYS: roster
-- ARGV: epoch
-- Answer: 'pinned', 'known', or 'gone' or 'trimmed' if there is no whole epoch to keep
-- Callers: penstock_common/stream/groups/roster.py

redis.call('HDEL', KEYS[1], '') -- the first write frees, so that the server permits the next at maxmemory

if redis.call('HEXISTS', KEYS[1], 'e:' .. ARGV[1]) == 0 then return 'gone' end
if redis.call('HEXISTS', KEYS[1], 't:' .. ARGV[1]) == 1 then return 'trimmed' end
local now = redis.call('TIME')
now = tonumber(now[1]) * 1000 + math.floor(tonumber(now[2]) / 1000)
if redis.call('HSETNX', KEYS[1], 'p:' .. ARGV[1], now) == 0 then return 'known' end
redis.call('HINCRBY', KEYS[1], 'gen', 1)
return 'pinned'
