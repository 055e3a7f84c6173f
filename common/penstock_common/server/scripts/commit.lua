-- Completes a commit, right after the XADD of the entry in the same MULTI. It learns the id of the new entry without
-- reading the payload, and writes the index record. It takes the entry back, before anybody can have seen it, in
-- three cases: the epoch takes no more entries; the committed samples of the shard do not end at `first`; the newest
-- record is another writer's.
--
-- KEYS: entries index roster state quarantine [segments]
-- ARGV: live_state epoch end first count bytes holes segment writer [field what]..: a field of the quarantine for
--   each bad sample
-- Answer: the bytes that the partition holds; or {newest record id, state, bytes, writer of the shard} where the
--   entry was taken back
-- Callers: penstock_common/stream/entries.py

local count, id, before = tonumber(ARGV[5]), '', nil
local function last()
  for _, group in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
    for i = 1, #group, 2 do
      if group[i] == 'name' and group[i + 1] == '_last' then
        for j = 1, #group, 2 do if group[j] == 'last-delivered-id' then return group[j + 1] end end
      end
    end
  end
end
local function take_back()
  if id == '' then return end
  redis.call('XDEL', KEYS[1], id)
  redis.call('XGROUP', 'SETID', KEYS[1], '_last', before) -- audit and deletion would take it for an entry
end
local state = redis.call('GET', KEYS[4])
if count == 0 then
  redis.call('HDEL', KEYS[3], '') -- the first write frees, so that the server permits the next at maxmemory
elseif state or redis.call('EXISTS', KEYS[1]) == 1 then -- a released epoch took no entry
  before = last()
  redis.call('XGROUP', 'SETID', KEYS[1], '_last', '$')
  id = last()
  if id == before then return redis.error_reply('PENSTOCK nothing was appended') end
end
local newest = redis.call('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)[1]
local at = newest and newest[1] or '0-0'
local writer = newest and '' or ARGV[9] -- the first writer that commits owns the shard
if newest then
  for i = 1, #newest[2], 2 do if newest[2][i] == 'w' then writer = newest[2][i + 1] end end
end
if state ~= ARGV[1] or at ~= ARGV[4] .. '-0' or writer ~= ARGV[9] then
  take_back()
  return {at, state or '', redis.call('HGET', KEYS[3], 'bytes') or '0', writer}
end
if ARGV[8] ~= '' and redis.call('HEXISTS', KEYS[6], 's:' .. ARGV[8]) == 1 then
  -- the commit is late: another writer may use the file by now, so nothing of this entry may stay
  take_back()
  return redis.error_reply('PENSTOCK its segment is sealed')
end
local record = {'e', id, 'f', ARGV[4], 'n', ARGV[5], 'b', ARGV[6], 'h', ARGV[7]}
if ARGV[8] ~= '' then
  record[#record + 1], record[#record + 2] = 's', ARGV[8]
  redis.call('HINCRBY', KEYS[6], ARGV[8], 1)
end
if writer ~= '' then record[#record + 1], record[#record + 2] = 'w', writer end
redis.call('XADD', KEYS[2], ARGV[3] .. '-0', unpack(record))
for i = 10, #ARGV, 2 do redis.call('HSET', KEYS[5], ARGV[i], ARGV[i + 1]) end
redis.call('HINCRBY', KEYS[3], 'b:' .. ARGV[2], ARGV[6])
return redis.call('HINCRBY', KEYS[3], 'bytes', ARGV[6])
