-- Takes back a manifest that was begun and could not be registered, or removes that of an epoch whose keys are gone.
--
-- KEYS: manifest epochs
-- ARGV: manifest_id epoch
-- Answer: 1; 0 if the key holds another manifest
-- Callers: penstock_common/stream/manifest.py

if redis.call('HGET', KEYS[1], 'id') ~= ARGV[1] then return 0 end
redis.call('UNLINK', KEYS[1])
redis.call('HDEL', KEYS[2], ARGV[2])
return 1
