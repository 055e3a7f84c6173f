-- Takes all these files of a watched folder for one epoch, or none of them.
--
-- KEYS: watched meta
-- ARGV: stream_id epoch [path value]..
-- Answer: 1 if they are taken; 0 if another watcher has one of them; -1 if the stream is gone
-- Callers: penstock_common/stream/watched_files.py

if redis.call('HGET', KEYS[2], 'id') ~= ARGV[1] or redis.call('HEXISTS', KEYS[2], 'deleting') == 1 then return -1 end
if redis.call('HEXISTS', KEYS[1], 'due:' .. ARGV[2]) == 1 then return 1 end
for i = 3, #ARGV, 2 do
  if redis.call('HEXISTS', KEYS[1], 'f:' .. ARGV[i]) == 1 then return 0 end
end
redis.call('HSET', KEYS[1], 'due:' .. ARGV[2], (#ARGV - 2) / 2)
for i = 3, #ARGV, 2 do redis.call('HSET', KEYS[1], 'f:' .. ARGV[i], ARGV[i + 1]) end
return 1
