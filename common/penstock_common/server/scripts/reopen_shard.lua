-- Takes back that a shard is finished, because the server of its partition lost a part of it. The epoch is then sized
-- again, and the shard is produced like any other that is not finished.
--
-- KEYS: manifest events epochs
-- ARGV: manifest_id epoch shard
-- Answer: 1; 0 if the key holds another manifest, or the shard is not finished
-- Callers: penstock_common/stream/manifest.py

redis.call('HDEL', KEYS[1], '') -- the first write frees, so that the server permits the next at maxmemory

local found = redis.call('HMGET', KEYS[1], 'id', 'state')
if found[1] ~= ARGV[1] or (found[2] ~= 'sized' and found[2] ~= 'produced') then return 0 end
if redis.call('HDEL', KEYS[1], 'd:' .. ARGV[3]) == 0 then return 0 end
redis.call('HINCRBY', KEYS[1], 'done', -1)
redis.call('HSET', KEYS[1], 'state', 'sized')
redis.call('HDEL', KEYS[1], 'produced_ms')
redis.call('HSET', KEYS[3], ARGV[2], 'sized')
redis.pcall('XADD', KEYS[2], 'MAXLEN', '~', '256', '*', 'sized', ARGV[2])
return 1
