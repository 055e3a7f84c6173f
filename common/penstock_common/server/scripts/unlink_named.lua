-- Unlinks keys that have only the name of a stream, unless a newer stream has it. Its meta may be the last of them.
--
-- KEYS: meta key..
-- ARGV: stream_id; '' if there was no meta, or none that could be read
-- Answer: the keys that were there; -1 if a newer stream has the name
-- Callers: penstock_common/stream/streams.py

local id = redis.call('TYPE', KEYS[1]).ok == 'hash' and redis.call('HGET', KEYS[1], 'id')
if id and id ~= ARGV[1] then return -1 end
local unlinked = 0
for at = 2, #KEYS do unlinked = unlinked + redis.call('UNLINK', KEYS[at]) end
return unlinked
