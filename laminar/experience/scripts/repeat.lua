-- Runs a script's body for many requests, given as id and arguments in turn.
local function once()
-- BODY
end

local answers = {}
for i = 1, #ARGV, 2 do
  request, args = ARGV[i], unpack_value(ARGV[i + 1])
  answers[#answers + 1] = once()
end
return answers
