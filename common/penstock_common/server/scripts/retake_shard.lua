-- A writer says again which shard it took, because the server may have restarted with an older state.
--
-- KEYS: manifest
-- ARGV: manifest_id token shard
-- Answer: 1; 0 if the epoch was removed, or completed without this shard
-- Callers: penstock_common/stream/feeds.py

if redis.call('HGET', KEYS[1], 'id') ~= ARGV[1] then return 0 end
if redis.call('HEXISTS', KEYS[1], 'w:' .. ARGV[2]) == 1 then return 1 end
if redis.call('HGET', KEYS[1], 'state') ~= 'open' then return 0 end
local taken = tonumber(redis.call('HGET', KEYS[1], 'next_shard') or '0')
if taken <= tonumber(ARGV[3]) then redis.call('HSET', KEYS[1], 'next_shard', ARGV[3] + 1) end
redis.call('HSET', KEYS[1], 'w:' .. ARGV[2], ARGV[3])
return 1
