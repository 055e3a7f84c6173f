-- Notes that segments get no more entries. `by` 1: the writer of the segment says so, and has no commit under way.
-- `by` 2: another process says so for a dead writer, whose last commit may still come; so a segment without an entry
-- is sealed, too.
--
-- KEYS: segments state
-- ARGV: manifest_id by segment..
-- Answer: 1; 0 if the epoch is released or has another manifest
-- Callers: penstock_common/stream/payloads.py

redis.call('HDEL', KEYS[1], '') -- the first write frees, so that the server permits the next at maxmemory

local state = redis.call('GET', KEYS[2])
if state ~= 'live:' .. ARGV[1] and state ~= 'abandoned:' .. ARGV[1] then return 0 end
for i = 3, #ARGV do
  if ARGV[2] == '2' or redis.call('HEXISTS', KEYS[1], ARGV[i]) == 1 then
    redis.call('HSET', KEYS[1], 's:' .. ARGV[i], ARGV[2])
  end
end
return 1
