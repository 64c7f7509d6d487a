#!lua flags=allow-oom
-- args: lineage, step. Deletes the payloads of a published step.
if args.lineage ~= run.lineage then
  return fail('step ' .. args.step .. ' belongs to lineage ' .. args.lineage .. ', the run is in lineage ' .. run.lineage)
end
if args.step > run.published then return fail('step ' .. args.step .. ' is not published yet, so its payloads are kept') end
local field = args.lineage .. '.' .. args.step
local taken = call('HGET', STEPS, field)
if taken then
  local bytes = 0
  for _, id in ipairs(unpack_value(taken)) do
    bytes = bytes + drop_payloads(id)
  end
  set('reserved', run.reserved - bytes)
  call('HDEL', STEPS, field)
end
return pack(true)
