-- Describes an entry without its payloads. It only reads.
--
-- KEYS: entries
-- ARGV: id most_header_bytes
-- Answer: {header, name, bytes, ..}; {} if the entry is gone
-- Callers: penstock_common/stream/entries.py

local entry = redis.call('XRANGE', KEYS[1], ARGV[1], ARGV[1])[1]
if not entry then return {} end
local fields, found = entry[2], {''}
if fields[1] == 'meta' and #fields[2] <= tonumber(ARGV[2]) then found[1] = fields[2] end
for i = 1, #fields, 2 do
  found[#found + 1] = string.sub(fields[i], 1, 200)
  found[#found + 1] = #fields[i + 1]
end
return found
