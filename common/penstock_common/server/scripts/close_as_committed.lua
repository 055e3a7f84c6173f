-- Ends an epoch with what is committed, on the word of an operator that no more will come.
--
-- KEYS: manifest events epochs meta
-- ARGV: manifest_id epoch stream_id size..: the sizes are those of the partitions of that stream
-- Answer: 1
-- Callers: penstock_common/stream/feeds.py

-- The age of an epoch counts from here, by the server's clock.
local function note_produced(manifest)
  local now = redis.call('TIME')
  redis.call('HSET', manifest, 'produced_ms', tonumber(now[1]) * 1000 + math.floor(tonumber(now[2]) / 1000))
end

if redis.call('HGET', KEYS[1], 'id') ~= ARGV[1] or redis.call('HGET', KEYS[4], 'id') ~= ARGV[3] then
  return redis.error_reply('PENSTOCK epoch has another manifest')
end
for i = 4, #ARGV do redis.call('HSET', KEYS[1], 'd:' .. (i - 4), ARGV[i]) end
redis.call('HSET', KEYS[1], 'shards', #ARGV - 3, 'done', #ARGV - 3, 'sealed', '1', 'state', 'produced',
  'sizes', '[' .. table.concat(ARGV, ',', 4) .. ']')
note_produced(KEYS[1])
redis.call('HSET', KEYS[3], ARGV[2], 'produced')
redis.pcall('XADD', KEYS[2], 'MAXLEN', '~', '256', '*', 'produced', ARGV[2])
return 1
