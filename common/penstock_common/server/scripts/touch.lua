-- Writes something of no meaning, which may be repeated, so that WAIT and WAITAOF have a write to answer for.
--
-- KEYS: meta events
-- ARGV: none
-- Answer: 1
-- Callers: penstock_common/stream/servers/durability.py

redis.call('HDEL', KEYS[1], '') -- the first write frees, so that the server permits the next at maxmemory

local said = redis.pcall('XADD', KEYS[2], 'NOMKSTREAM', 'MAXLEN', '~', '256', '*', 'durable', '')
local version = redis.call('HGET', KEYS[1], 'v')
-- the key events is no stream: WAIT needs a write to answer for all the same
if type(said) == 'table' and said.err and version then redis.call('HSET', KEYS[1], 'v', version) end
return 1
