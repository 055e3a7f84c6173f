-- Claims an entry only from the member that was seen with it. XCLAIM alone asks for no holder: of two members that
-- claimed the same returned entry, the second took it from the first, and both gave it to their training.
--
-- KEYS: entries
-- ARGV: group member holder min_idle_ms id deliveries
-- Answer: 1 if the entry was claimed, else 0
-- Callers: penstock_common/stream/entries.py

local held = redis.pcall('XPENDING', KEYS[1], ARGV[1], ARGV[5], ARGV[5], 1, ARGV[3])
if held.err then
  if string.find(held.err, 'NOGROUP') then return 0 end -- the epoch was released after the entry was listed
  return held
end
if #held == 0 then return 0 end
local claim = {KEYS[1], ARGV[1], ARGV[2], ARGV[4], ARGV[5], 'RETRYCOUNT', ARGV[6], 'JUSTID'}
return #redis.call('XCLAIM', unpack(claim))
