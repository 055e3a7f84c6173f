-- Reports the rate of a worker, trainer or fleet, as of now. With sweep_ms > 0 it removes reports that are older. A
-- report to a stream that is gone is refused, because nobody would remove the key.
--
-- KEYS: paces meta
-- ARGV: stream_id field value sweep_ms
-- Answer: 1; 0 if the stream is gone
-- Callers: penstock_common/stream/reported_rates.py

redis.call('HDEL', KEYS[1], '') -- the first write frees, so that the server permits the next at maxmemory

if redis.call('HGET', KEYS[2], 'id') ~= ARGV[1] or redis.call('HEXISTS', KEYS[2], 'deleting') == 1 then return 0 end
local now = redis.call('TIME')
now = tonumber(now[1]) * 1000 + math.floor(tonumber(now[2]) / 1000)
local said = cjson.decode(ARGV[3])
said.seen = now
redis.call('HSET', KEYS[1], ARGV[2], cjson.encode(said))
if tonumber(ARGV[4]) > 0 then
  local all = redis.call('HGETALL', KEYS[1])
  for i = 1, #all, 2 do
    if cjson.decode(all[i + 1]).seen < now - tonumber(ARGV[4]) then redis.call('HDEL', KEYS[1], all[i]) end
  end
end
return 1
