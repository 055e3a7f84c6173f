-- Unlinks keys of an epoch in a partition, if the roster notes that this epoch was retired there. Otherwise the keys may
-- belong to a newer epoch: a server that lost its newest writes gives out a number again.
--
-- KEYS: roster key..
-- ARGV: epoch manifest_id
-- Answer: the keys that were there
-- Callers: penstock_common/stream/removal/deletion.py

if redis.call('HGET', KEYS[1], 'x:' .. ARGV[1]) ~= ARGV[2] then return 0 end
local unlinked = 0
for at = 2, #KEYS do unlinked = unlinked + redis.call('UNLINK', KEYS[at]) end
return unlinked
