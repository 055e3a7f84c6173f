-- Lists index records from one record on, as one string. A client splits it in a tenth of the time that it needs for
-- the records. It only reads.
--
-- KEYS: index
-- ARGV: record_id count
-- Answer: '<record id> <entry id>' of each record that names an entry, separated by spaces
-- Callers: penstock_consumer/read/receive.py

local found = {}
for _, record in ipairs(redis.call('XRANGE', KEYS[1], ARGV[1], '+', 'COUNT', ARGV[2])) do
  if record[2][1] == 'e' and record[2][2] ~= '' then found[#found + 1] = record[1] .. ' ' .. record[2][2] end
end
return table.concat(found, ' ')
