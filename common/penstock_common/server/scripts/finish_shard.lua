-- Notes that a shard is finished; the epoch is produced once every planned shard is.
--
-- KEYS: manifest events epochs
-- ARGV: manifest_id epoch shard size [partition first_ms last_ms server]: the times of the oldest and newest entry of
--   the shard that were written while the server of their partition had no replica
-- Answer: the state of the epoch; an error if the shard ended before with fewer samples, which readers go by
-- Callers: penstock_common/stream/manifest.py

redis.call('HDEL', KEYS[1], '') -- the first write frees, so that the server permits the next at maxmemory

-- The age of an epoch counts from here, by the server's clock.
local function note_produced(manifest)
  local now = redis.call('TIME')
  redis.call('HSET', manifest, 'produced_ms', tonumber(now[1]) * 1000 + math.floor(tonumber(now[2]) / 1000))
end

-- Notes the times of entries that were written while their server had no replica.
local function note_unreplicated(manifest)
  local field, first, last = 'unreplicated:' .. ARGV[5], tonumber(ARGV[6]), tonumber(ARGV[7])
  local first_before, last_before = string.match(redis.call('HGET', manifest, field) or '', '^(%d+) (%d+) ')
  if first_before then first, last = math.min(first, first_before), math.max(last, last_before) end
  redis.call('HSET', manifest, field, string.format('%.0f %.0f %s', first, last, ARGV[8]))
end

if redis.call('HGET', KEYS[1], 'id') ~= ARGV[1] then return redis.error_reply('PENSTOCK epoch has another manifest') end
if ARGV[5] then note_unreplicated(KEYS[1]) end
if redis.call('HSETNX', KEYS[1], 'd:' .. ARGV[3], ARGV[4]) == 1 then redis.call('HINCRBY', KEYS[1], 'done', 1) end
local size = redis.call('HGET', KEYS[1], 'd:' .. ARGV[3])
if tonumber(size) < tonumber(ARGV[4]) then -- an operator closed the epoch while its writer went on
  return redis.error_reply('PENSTOCK shard ' .. ARGV[3] .. ' ended with ' .. size .. ' samples')
end
local state = redis.call('HGET', KEYS[1], 'state')
if state == 'sized' and redis.call('HGET', KEYS[1], 'done') == redis.call('HGET', KEYS[1], 'shards') then
  redis.call('HSET', KEYS[1], 'state', 'produced')
  note_produced(KEYS[1])
  redis.call('HSET', KEYS[3], ARGV[2], 'produced')
  redis.pcall('XADD', KEYS[2], 'MAXLEN', '~', '256', '*', 'produced', ARGV[2])
  return 'produced'
end
return state
