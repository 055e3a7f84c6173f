-- Writes something of no meaning to a partition, which may be repeated, so that WAIT and WAITAOF have a write to answer for.
--
-- KEYS: roster
-- ARGV: none
-- Answer: 1, or 0 without a roster, where nothing is written
-- Callers: penstock_common/stream/servers/durability.py

redis.call('HDEL', KEYS[1], '') -- the first write frees, so that the server permits the next at maxmemory

if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
redis.call('HINCRBY', KEYS[1], 'bytes', 0)
return 1
