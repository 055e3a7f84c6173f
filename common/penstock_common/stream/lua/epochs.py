"""The Lua of epochs: opening, sizing, completing shards, feeds, and the first step of a release.

Called by ``manifest``, ``feeds`` and ``release``, which say what the replies mean.
"""

from __future__ import annotations

from penstock_common.stream.lua.pieces import GO_ON, MARK_LOST

OPEN_EPOCH = """
-- KEYS roster state entries | ARGV epoch manifest_id : registers first, then makes every (epoch, group) pair at 0
-- 0 for an epoch that is being released.
local epoch, id = ARGV[1], ARGV[2]
if redis.call('HEXISTS', KEYS[1], 'x:' .. epoch) == 1 then return 0 end
local known = redis.call('HGET', KEYS[1], 'e:' .. epoch)
if known and known ~= id then return redis.error_reply('PENSTOCK epoch has another manifest') end
redis.call('HSET', KEYS[1], 'e:' .. epoch, id)
redis.call('SET', KEYS[2], 'live:' .. id, 'NX')
local groups = {'_last'}
local all = redis.call('HGETALL', KEYS[1])
for i = 1, #all, 2 do
  local record = string.sub(all[i], 1, 2) == 'g:' and cjson.decode(all[i + 1])
  if record and record.kind == 'shared' and record.first <= tonumber(epoch) then
    groups[#groups + 1] = string.sub(all[i], 3)
  end
end
for _, group in ipairs(groups) do
  local made = redis.pcall('XGROUP', 'CREATE', KEYS[3], group, '0', 'MKSTREAM')
  if made.err and not string.find(made.err, 'BUSYGROUP') then return made end
end
return 1
"""

UNMAKE_EPOCH = """
-- KEYS roster state entries | ARGV epoch manifest_id : takes back what OPEN_EPOCH made of an epoch that was released
-- meanwhile; what is of another manifest stays. 0 where nothing was.
local epoch, id = ARGV[1], ARGV[2]
if redis.call('HGET', KEYS[1], 'e:' .. epoch) ~= id then return 0 end
local bytes = tonumber(redis.call('HGET', KEYS[1], 'b:' .. epoch) or '0')
if bytes ~= 0 then redis.call('HINCRBY', KEYS[1], 'bytes', 0 - bytes) end
redis.call('HDEL', KEYS[1], 'e:' .. epoch, 't:' .. epoch, 'b:' .. epoch, 'p:' .. epoch)
if redis.call('GET', KEYS[2]) == 'live:' .. id then redis.call('UNLINK', KEYS[2]) end
redis.call('UNLINK', KEYS[3])
return 1
"""

FORGET_MANIFEST = """
-- KEYS manifest epochs | ARGV manifest_id epoch : takes back a manifest that was begun and could not be registered
if redis.call('HGET', KEYS[1], 'id') ~= ARGV[1] then return 0 end
redis.call('UNLINK', KEYS[1])
redis.call('HDEL', KEYS[2], ARGV[2])
return 1
"""

NOTE_PRODUCED = """
local function note_produced(manifest)
  local now = redis.call('TIME')
  redis.call('HSET', manifest, 'produced_ms', tonumber(now[1]) * 1000 + math.floor(tonumber(now[2]) / 1000))
end
"""
"""From when an epoch's age counts, by the server's clock."""

SIZE_EPOCH = (
    GO_ON
    + NOTE_PRODUCED
    + """
-- KEYS manifest events epochs | ARGV manifest_id epoch shards sizes_json
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
"""
)

FINISH_SHARD = (
    GO_ON
    + NOTE_PRODUCED
    + """
-- KEYS manifest events epochs | ARGV manifest_id epoch shard size : produced once every planned shard is done
if redis.call('HGET', KEYS[1], 'id') ~= ARGV[1] then return redis.error_reply('PENSTOCK epoch has another manifest') end
if redis.call('HSETNX', KEYS[1], 'd:' .. ARGV[3], ARGV[4]) == 1 then redis.call('HINCRBY', KEYS[1], 'done', 1) end
local state = redis.call('HGET', KEYS[1], 'state')
if state == 'sized' and redis.call('HGET', KEYS[1], 'done') == redis.call('HGET', KEYS[1], 'shards') then
  redis.call('HSET', KEYS[1], 'state', 'produced')
  note_produced(KEYS[1])
  redis.call('HSET', KEYS[3], ARGV[2], 'produced')
  redis.pcall('XADD', KEYS[2], 'MAXLEN', '~', '256', '*', 'produced', ARGV[2])
  return 'produced'
end
return state
"""
)

RESERVE_SHARD = """
-- KEYS manifest | ARGV manifest_id shard
if redis.call('HGET', KEYS[1], 'id') ~= ARGV[1] then return 0 end
local taken = tonumber(redis.call('HGET', KEYS[1], 'next_shard') or '0')
if taken <= tonumber(ARGV[2]) then redis.call('HSET', KEYS[1], 'next_shard', ARGV[2] + 1) end
return 1
"""

TAKE_SHARD = """
-- KEYS manifest | ARGV token : the next shard of an open epoch for one more writer of a feed, -1 once it is sealed;
-- to a token that has one, the same again
local had = redis.call('HGET', KEYS[1], 'w:' .. ARGV[1])
if had then return tonumber(had) end
if redis.call('HGET', KEYS[1], 'state') ~= 'open' or redis.call('HEXISTS', KEYS[1], 'sealed') == 1 then return -1 end
local shard = redis.call('HINCRBY', KEYS[1], 'next_shard', 1) - 1
redis.call('HSET', KEYS[1], 'w:' .. ARGV[1], shard)
return shard
"""

RETAKE_SHARD = """
-- KEYS manifest | ARGV manifest_id token shard : a writer says again which shard it took, to a server that may have
-- come back from before that. 0 where the epoch was removed, or completed without this shard.
if redis.call('HGET', KEYS[1], 'id') ~= ARGV[1] then return 0 end
if redis.call('HEXISTS', KEYS[1], 'w:' .. ARGV[2]) == 1 then return 1 end
if redis.call('HGET', KEYS[1], 'state') ~= 'open' then return 0 end
local taken = tonumber(redis.call('HGET', KEYS[1], 'next_shard') or '0')
if taken <= tonumber(ARGV[3]) then redis.call('HSET', KEYS[1], 'next_shard', ARGV[3] + 1) end
redis.call('HSET', KEYS[1], 'w:' .. ARGV[2], ARGV[3])
return 1
"""

FINISH_FEED_SHARD = (
    GO_ON
    + NOTE_PRODUCED
    + """
-- KEYS manifest events epochs | ARGV manifest_id epoch shard size : seals the epoch; the last writer to finish sizes it
if redis.call('HGET', KEYS[1], 'id') ~= ARGV[1] then return redis.error_reply('PENSTOCK epoch has another manifest') end
redis.call('HSET', KEYS[1], 'sealed', '1')
if redis.call('HSETNX', KEYS[1], 'd:' .. ARGV[3], ARGV[4]) == 1 then redis.call('HINCRBY', KEYS[1], 'done', 1) end
local taken = tonumber(redis.call('HGET', KEYS[1], 'next_shard'))
local done = tonumber(redis.call('HGET', KEYS[1], 'done'))
if redis.call('HGET', KEYS[1], 'state') ~= 'open' or done < taken then return 0 end
local sizes = {}
for shard = 0, taken - 1 do sizes[shard + 1] = redis.call('HGET', KEYS[1], 'd:' .. shard) end
redis.call('HSET', KEYS[1], 'shards', taken, 'sizes', '[' .. table.concat(sizes, ',') .. ']', 'state', 'produced')
note_produced(KEYS[1])
redis.call('HSET', KEYS[3], ARGV[2], 'produced')
redis.pcall('XADD', KEYS[2], 'MAXLEN', '~', '256', '*', 'produced', ARGV[2])
return 1
"""
)

CLOSE_AS_COMMITTED = (
    NOTE_PRODUCED
    + """
-- KEYS manifest events epochs | ARGV manifest_id epoch sizes.. : an operator's word that no more will come
if redis.call('HGET', KEYS[1], 'id') ~= ARGV[1] then return redis.error_reply('PENSTOCK epoch has another manifest') end
for i = 3, #ARGV do redis.call('HSET', KEYS[1], 'd:' .. (i - 3), ARGV[i]) end
redis.call('HSET', KEYS[1], 'shards', #ARGV - 2, 'done', #ARGV - 2, 'sealed', '1', 'state', 'produced',
  'sizes', '[' .. table.concat(ARGV, ',', 3) .. ']')
note_produced(KEYS[1])
redis.call('HSET', KEYS[3], ARGV[2], 'produced')
redis.pcall('XADD', KEYS[2], 'MAXLEN', '~', '256', '*', 'produced', ARGV[2])
return 1
"""
)

RETIRE = (
    GO_ON
    + MARK_LOST
    + """
-- KEYS roster state | ARGV gen epoch manifest_id : first step of a release; the keys are unlinked after it
-- gen '' = whatever the roster is.
if ARGV[1] ~= '' and (redis.call('HGET', KEYS[1], 'gen') or '0') ~= ARGV[1] then return -1 end
if redis.call('HEXISTS', KEYS[1], 'e:' .. ARGV[2]) == 0 then return 0 end
redis.call('SET', KEYS[2], 'gone:' .. ARGV[3])
mark_lost(KEYS[1], tonumber(ARGV[2]))
local bytes = tonumber(redis.call('HGET', KEYS[1], 'b:' .. ARGV[2]) or '0')
redis.call('HINCRBY', KEYS[1], 'bytes', 0 - bytes)
redis.call('HDEL', KEYS[1], 'e:' .. ARGV[2], 't:' .. ARGV[2], 'b:' .. ARGV[2], 'p:' .. ARGV[2])
redis.call('HSET', KEYS[1], 'x:' .. ARGV[2], ARGV[3])
for _, field in ipairs(redis.call('HKEYS', KEYS[1])) do
  if string.sub(field, 1, #ARGV[2] + 3) == 'w:' .. ARGV[2] .. ':' then redis.call('HDEL', KEYS[1], field) end
  if string.sub(field, 1, 2) == 'd:' and string.sub(field, -#ARGV[2] - 1) == ':' .. ARGV[2] then
    redis.call('HDEL', KEYS[1], field)
    local name = string.sub(field, 3, -#ARGV[2] - 2)
    local text = redis.call('HGET', KEYS[1], 'g:' .. name)
    if text then
      local record = cjson.decode(text)
      record.read = math.max(record.read or -1, tonumber(ARGV[2]))
      redis.call('HSET', KEYS[1], 'g:' .. name, cjson.encode(record))
    end
  end
end
return bytes
"""
)
