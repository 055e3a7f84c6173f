-- Fixes the number of shards and their sizes; the epoch is produced if all of them are finished.
--
-- KEYS: manifest events epochs
-- ARGV: manifest_id epoch shards sizes_json
-- Answer: the state of the epoch
-- Callers: penstock_common/stream/manifest.py

redis.call('HDEL', KEYS[1], '') -- the first write frees, so that the server permits the next at maxmemory

-- The age of an epoch counts from here, by the server's clock.
local function note_produced(manifest)
  local now = redis.call('TIME')
  redis.call('HSET', manifest, 'produced_ms', tonumber(now[1]) * 1000 + math.floor(tonumber(now[2]) / 1000))
end

if redis.call('HGET', KEYS[1], 'id') ~= ARGV[1] then return redis.error_reply('PENSTOCK epoch has another manifest') end
local state = redis.call('HGET', KEYS[1], 'state')
if state ~= 'open' then return state end
state = 'sized'
redis.call('HSET', KEYS[1], 'shards', ARGV[3], 'sizes', ARGV[4])
if tonumber(redis.call('HGET', KEYS[1], 'done') or '0') == tonumber(ARGV[3]) then
  state = 'produced'
  note_produced(KEYS[1])
end
redis.call('HSET', KEYS[1], 'state', state)
redis.call('HSET', KEYS[3], ARGV[2], state)
redis.pcall('XADD', KEYS[2], 'MAXLEN', '~', '256', '*', state, ARGV[2])
return state
