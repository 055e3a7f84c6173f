-- Completes a repair, right after the XADD of the entry in the same MULTI, as commit.lua does. target is the index of
-- the shard if the record goes to its end, else the repairs key. found is the id of an entry that is there and that
-- no record named; nothing is appended then.
--
-- KEYS: entries target roster
-- ARGV: epoch record_id first count bytes holes found
-- Answer: the id of the entry
-- Callers: penstock_common/stream/mending/repairs.py

local function last()
  for _, group in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
    for i = 1, #group, 2 do
      if group[i] == 'name' and group[i + 1] == '_last' then
        for j = 1, #group, 2 do if group[j] == 'last-delivered-id' then return group[j + 1] end end
      end
    end
  end
end
local id, bytes = ARGV[7], ARGV[5]
if id == '' and tonumber(ARGV[4]) > 0 then
  local before = last()
  redis.call('XGROUP', 'SETID', KEYS[1], '_last', '$')
  id = last()
  if id == before then return redis.error_reply('PENSTOCK nothing was appended') end
  redis.call('HINCRBY', KEYS[3], 'b:' .. ARGV[1], bytes)
  redis.call('HINCRBY', KEYS[3], 'bytes', bytes)
end
redis.call('XADD', KEYS[2], ARGV[2], 'e', id, 'f', ARGV[3], 'n', ARGV[4], 'b', bytes, 'h', ARGV[6])
return id
