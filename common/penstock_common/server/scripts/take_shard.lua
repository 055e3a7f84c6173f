-- Takes the next shard of an open epoch for one more writer of a feed. A token that has a shard gets the same one.
--
-- KEYS: manifest
-- ARGV: token manifest_id
-- Answer: the shard; -1 if the epoch is sealed, or the key holds another manifest
-- Callers: penstock_common/stream/feeds.py

if redis.call('HGET', KEYS[1], 'id') ~= ARGV[2] then return -1 end
local had = redis.call('HGET', KEYS[1], 'w:' .. ARGV[1])
if had then return tonumber(had) end
if redis.call('HGET', KEYS[1], 'state') ~= 'open' or redis.call('HEXISTS', KEYS[1], 'sealed') == 1 then return -1 end
local shard = redis.call('HINCRBY', KEYS[1], 'next_shard', 1) - 1
redis.call('HSET', KEYS[1], 'w:' .. ARGV[1], shard)
return shard
