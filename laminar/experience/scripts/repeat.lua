-- Runs a script's body for many requests: all ids and arguments as one list, then the payloads. Answers a list, in which an error is a value.
local function once()
-- BODY
end

late = { counts = {}, headers = {}, hashes = {} }
local answers = {}
for i, one in ipairs(args) do
  request, args, payload = one[1], one[2], ARGV[i + 2]
  answers[#answers + 1] = once()
end
write_hashes()
local written = late
late = nil
for name, number in pairs(written.counts) do
  count(name, number)
end
for _, header in pairs(written.headers) do
  save(header)
end
if written.reserved then set('reserved', run.reserved) end
return answers
