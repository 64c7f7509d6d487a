#!lua flags=allow-oom
-- args: lineage, step. Deletes the payloads of a published step, and of earlier ones whose ack was lost.
local refusal = fenced('step ' .. args.step)
if refusal then return refusal end
if args.step > run.published then return fail('step ' .. args.step .. ' is not published yet, so its payloads are kept') end
local flat = call('HGETALL', STEPS)
for i = 1, #flat, 2 do
  if tonumber(string.match(flat[i], '%d+$')) <= args.step then
    local bytes = 0
    for _, id in ipairs(unpack_value(flat[i + 1])) do
      bytes = bytes + drop_payloads(id)
    end
    set('reserved', run.reserved - bytes)
    call('HDEL', STEPS, flat[i])
  end
end
return pack(true)
