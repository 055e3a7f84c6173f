"""The Lua of watched folders: which files are taken for which epoch, said once.

Who calls it, and what a taking means, is ``stream.watched``'s.
"""

from __future__ import annotations

TAKE_FILES = """
-- KEYS watched meta | ARGV stream_id epoch path value ... : takes all these files for one epoch, or none of them
-- 1 taken, 0 another watcher has one of them, -1 this life of the stream is over
if redis.call('HGET', KEYS[2], 'id') ~= ARGV[1] or redis.call('HEXISTS', KEYS[2], 'deleting') == 1 then return -1 end
if redis.call('HEXISTS', KEYS[1], 'due:' .. ARGV[2]) == 1 then return 1 end
for i = 3, #ARGV, 2 do
  if redis.call('HEXISTS', KEYS[1], 'f:' .. ARGV[i]) == 1 then return 0 end
end
redis.call('HSET', KEYS[1], 'due:' .. ARGV[2], (#ARGV - 2) / 2)
for i = 3, #ARGV, 2 do redis.call('HSET', KEYS[1], 'f:' .. ARGV[i], ARGV[i + 1]) end
return 1
"""
