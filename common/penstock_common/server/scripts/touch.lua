-- Writes to a hash and leaves it as it was, also where there is none, so that WAIT and WAITAOF have a write to answer for.
--
-- KEYS: hash
-- ARGV: none
-- Answer: 1
-- Callers: penstock_common/stream/servers/durability.py

redis.call('HDEL', KEYS[1], '') -- the first write frees, so that the server permits the next at maxmemory

redis.call('HSET', KEYS[1], '', '')
redis.call('HDEL', KEYS[1], '')
return 1
