-- Begins the manifest of an epoch; the fields of the first process stay, all of them. A released epoch is refused: a
-- process that stood still meanwhile must not bring it back, because groups would read it again.
--
-- KEYS: meta manifest epochs
-- ARGV: stream_id epoch state [field value]..
-- Answer: 1; 0 if the epoch was released; -1 if the stream is gone
-- Callers: penstock_common/stream/manifest.py

-- A stream that somebody deleted meanwhile must not come back as a part of its meta key.
local found = redis.call('HMGET', KEYS[1], 'id', 'deleting')
if found[1] ~= ARGV[1] or found[2] then return -1 end

local epoch = tonumber(ARGV[2])
for range in string.gmatch(redis.call('HGET', KEYS[1], 'released') or '', '[^,]+') do
  local low, high = string.match(range, '^(%d+)%-?(%d*)$')
  if epoch >= tonumber(low) and epoch <= tonumber(high == '' and low or high) then return 0 end
end
for i = 4, #ARGV, 2 do redis.call('HSETNX', KEYS[2], ARGV[i], ARGV[i + 1]) end
redis.call('HSETNX', KEYS[3], ARGV[2], ARGV[3])
return 1
