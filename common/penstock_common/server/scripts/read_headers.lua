-- Reads the headers of entries. No command returns an entry without its payload; XRANGE inside a script does not send
-- the payload to the client. It only reads.
--
-- KEYS: entries
-- ARGV: most_header_bytes id..
-- Answer: the header of each entry; '' where there is no such entry, '-' where it has no header
-- Callers: penstock_common/stream/entries.py

local found = {}
for i = 2, #ARGV do
  local entry = redis.call('XRANGE', KEYS[1], ARGV[i], ARGV[i])[1]
  local meta = entry and entry[2][1] == 'meta' and entry[2][2]
  found[i - 1] = not entry and '' or (meta and #meta <= tonumber(ARGV[1]) and meta ~= '') and meta or '-'
end
return found
