-- Notes a loss, or what settles one, once, in a manifest or in the meta key of a stream, if the hash has this id.
--
-- KEYS: hash
-- ARGV: id most field note
-- Answer: 1 if the note is there; 0 if the hash has another id; -1 if it has `most` notes of this kind already. The
--   kind is the field up to its first ':'
-- Callers: penstock_common/stream/groups/losses.py

redis.call('HDEL', KEYS[1], '') -- the first write frees, so that the server permits the next at maxmemory

if redis.call('HGET', KEYS[1], 'id') ~= ARGV[1] then return 0 end
if redis.call('HEXISTS', KEYS[1], ARGV[3]) == 1 then return 1 end
local noted, kind = 0, string.match(ARGV[3], '^%a+:')
for _, field in ipairs(redis.call('HKEYS', KEYS[1])) do
  if string.sub(field, 1, #kind) == kind then noted = noted + 1 end
end
if noted >= tonumber(ARGV[2]) then return -1 end
redis.call('HSET', KEYS[1], ARGV[3], ARGV[4])
return 1
