-- Lists entries without payloads. No command does so; XRANGE inside a script copies the payloads in the server's
-- memory, one page at a time, and does not send them. It only reads.
--
-- KEYS: entries
-- ARGV: from count most_header_bytes
-- Answer: {id, header, payload bytes} of each entry
-- Callers: penstock_common/stream/audit/survey.py

local found = {}
for i, entry in ipairs(redis.call('XRANGE', KEYS[1], ARGV[1], '+', 'COUNT', ARGV[2])) do
  local fields, meta, bytes = entry[2], '', 0
  for j = 1, #fields, 2 do
    if j == 1 and fields[1] == 'meta' then
      if #fields[2] <= tonumber(ARGV[3]) then meta = fields[2] end
    elseif string.sub(fields[j], -7) ~= '.shapes' then
      bytes = bytes + #fields[j + 1]
    end
  end
  found[i] = {entry[1], meta, bytes}
end
return found
