-- Removes the Redis consumer of a member that is gone. A consumer with pending entries stays, because they would be
-- lost with it.
--
-- KEYS: entries..
-- ARGV: group member
-- Answer: how many consumers were removed
-- Callers: penstock_common/stream/groups/roster.py

local gone = 0
for i = 1, #KEYS do
  local pending = redis.pcall('XPENDING', KEYS[i], ARGV[1], '-', '+', 1, ARGV[2])
  if not pending.err and #pending == 0 then
    local done = redis.pcall('XGROUP', 'DELCONSUMER', KEYS[i], ARGV[1], ARGV[2])
    if type(done) == 'number' then gone = gone + 1 end
  end
end
return gone
