-- Removes a field that still has this value: the note of a released epoch in a roster, or of a deleted stream in the
-- directory. A server that lost its newest writes gives out a number again, and a stream may be made again.
--
-- KEYS: hash
-- ARGV: field value
-- Answer: 1; 0 if the field has another value or none
-- Callers: penstock_common/stream/directory.py penstock_common/stream/removal/deletion.py

if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then return 0 end
return redis.call('HDEL', KEYS[1], ARGV[1])
