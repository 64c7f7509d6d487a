#!lua flags=allow-oom
-- args: lineage, number. Sets the published number and frees the slots of the step that made it, in one script.
if run.opened ~= 1 or args.lineage ~= run.lineage then
  return fail('number ' .. args.number .. ' belongs to lineage ' .. args.lineage .. ', the run is in lineage ' .. run.lineage)
end
if args.number == run.published then return pack(true) end
if args.number ~= run.published + 1 then
  return fail('number ' .. args.number .. ' cannot follow ' .. run.published .. ': each step publishes exactly once')
end
local taken = call('HGET', STEPS, args.lineage .. '.' .. args.number)
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
