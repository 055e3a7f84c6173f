-- Notes that a group is done with an epoch: its ledger covers the manifest.
--
-- KEYS: roster
-- ARGV: group epoch
-- Answer: 1 if the note is new, else 0
-- Callers: penstock_common/stream/groups/roster.py

redis.call('HDEL', KEYS[1], '') -- the first write frees, so that the server permits the next at maxmemory

if redis.call('HEXISTS', KEYS[1], 'g:' .. ARGV[1]) == 0 then return 0 end
return redis.call('HSET', KEYS[1], 'd:' .. ARGV[1] .. ':' .. ARGV[2], '1')
