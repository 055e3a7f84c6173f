-- Notes that a writer of a shard waits for quota. The note is refused once the partition does not know the epoch,
-- because nobody would remove it.
--
-- KEYS: roster
-- ARGV: epoch shard waited_ms need held why is_next
-- Answer: since when it waits, in milliseconds; 0 if the epoch is gone
-- Callers: penstock_common/stream/groups/roster.py

redis.call('HDEL', KEYS[1], '') -- the first write frees, so that the server permits the next at maxmemory

if redis.call('HEXISTS', KEYS[1], 'e:' .. ARGV[1]) == 0 then return 0 end
local now = redis.call('TIME')
now = tonumber(now[1]) * 1000 + math.floor(tonumber(now[2]) / 1000)
local note = {since = now - tonumber(ARGV[3]), seen = now, need = tonumber(ARGV[4]), held = tonumber(ARGV[5]),
  why = ARGV[6], next = ARGV[7] == '1'}
redis.call('HSET', KEYS[1], 'w:' .. ARGV[1] .. ':' .. ARGV[2], cjson.encode(note))
return note.since
