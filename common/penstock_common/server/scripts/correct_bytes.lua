-- Corrects the byte count of an epoch, if it is still the one that the caller compared.
--
-- KEYS: roster
-- ARGV: epoch counted held
-- Answer: 1; 0 if the count changed
-- Callers: penstock_common/stream/mending/repairs.py

redis.call('HDEL', KEYS[1], '') -- the first write frees, so that the server permits the next at maxmemory

if (redis.call('HGET', KEYS[1], 'b:' .. ARGV[1]) or '0') ~= ARGV[2] then return 0 end
redis.call('HINCRBY', KEYS[1], 'b:' .. ARGV[1], tonumber(ARGV[3]) - tonumber(ARGV[2]))
redis.call('HINCRBY', KEYS[1], 'bytes', tonumber(ARGV[3]) - tonumber(ARGV[2]))
return 1
