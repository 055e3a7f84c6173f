-- Notes in one partition that an epoch is abandoned, if its state is still there: no late write is accepted after it.
--
-- KEYS: roster state
-- ARGV: manifest_id
-- Answer: 1; 0 if there is no state
-- Callers: penstock_common/stream/manifest.py

redis.call('HDEL', KEYS[1], '') -- the first write frees, so that the server permits the next at maxmemory

return redis.call('SET', KEYS[2], 'abandoned:' .. ARGV[1], 'XX') and 1 or 0
