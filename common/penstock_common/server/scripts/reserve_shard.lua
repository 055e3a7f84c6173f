-- Raises the next shard number of an epoch above this shard.
--
-- KEYS: manifest
-- ARGV: manifest_id shard
-- Answer: 1; 0 if the key holds another manifest
-- Callers: penstock_common/stream/manifest.py

if redis.call('HGET', KEYS[1], 'id') ~= ARGV[1] then return 0 end
local taken = tonumber(redis.call('HGET', KEYS[1], 'next_shard') or '0')
if taken <= tonumber(ARGV[2]) then redis.call('HSET', KEYS[1], 'next_shard', ARGV[2] + 1) end
return 1
