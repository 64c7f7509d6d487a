#!lua flags=allow-oom
-- args: lineage, number, trained (whether its step must have taken groups). Sets the published number and frees the slots of the step that made it, in one script.
local refusal = fenced('number ' .. args.number)
if refusal then return refusal end
if args.number == run.published then return pack(true) end
if args.number ~= run.published + 1 then
  return fail('number ' .. args.number .. ' cannot follow ' .. run.published .. ': each step publishes exactly once')
end
local taken = call('HGET', STEPS, args.lineage .. '.' .. args.number)
if args.trained and not taken then return fail('step ' .. args.number .. ' was trained, but its groups are forgotten') end
for _, id in ipairs(taken and unpack_value(taken) or {}) do
  local header = load(id)
  if header then
    count('taken', -header.good)
    count('trained', header.good)
    forget(header)
  end
end
local held = call('HGETALL', HELD)
for i = 1, #held, 2 do
  if tonumber(held[i + 1]) <= args.number then call('HDEL', HELD, held[i]) end
end
set('published', args.number)
return pack(true)
