-- Runs a script's body for many requests: id, arguments and payload in turn. Answers a list, in which an error is a value.
local function once()
-- BODY
end

late = { counts = {}, headers = {} }
local answers = {}
for i = 1, #ARGV, 3 do
  request, args, payload = ARGV[i], unpack_value(ARGV[i + 1]), ARGV[i + 2]
  answers[#answers + 1] = once()
end
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
