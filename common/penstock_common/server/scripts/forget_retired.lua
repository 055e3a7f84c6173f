-- The last step of a release in a partition: its roster forgets the epoch. Another manifest's note stays, because a
-- server that lost its newest writes gives out a number again.
--
-- KEYS: roster
-- ARGV: epoch manifest_id
-- Answer: 1; 0 if the roster does not note that this manifest's epoch was retired
-- Callers: penstock_common/stream/removal/deletion.py

if redis.call('HGET', KEYS[1], 'x:' .. ARGV[1]) ~= ARGV[2] then return 0 end
return redis.call('HDEL', KEYS[1], 'x:' .. ARGV[1])
