-- Unlinks keys of an epoch in a partition whose roster notes that this epoch was retired there. Other keys of that number
-- belong to an epoch that was opened since, by a server that had lost the number.
--
-- KEYS: roster key..
-- ARGV: epoch manifest_id
-- Answer: the keys that were there
-- Callers: penstock_common/stream/removal/deletion.py

if redis.call('HGET', KEYS[1], 'x:' .. ARGV[1]) ~= ARGV[2] then return 0 end
local unlinked = 0
for at = 2, #KEYS do unlinked = unlinked + redis.call('UNLINK', KEYS[at]) end
return unlinked
