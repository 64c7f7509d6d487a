#!lua flags=allow-oom
-- args: lineage, step, groups. All or none; a step that was taken before answers what it took then.
local refusal = fenced('step ' .. args.step)
if refusal then return refusal end
local field = args.lineage .. '.' .. args.step
local taken = call('HGET', STEPS, field)
if taken then return taken end
if args.step ~= run.published + 1 then
  return fail('step ' .. args.step .. ' cannot take groups while number ' .. run.published .. ' is published')
end
if #args.groups == 0 then return fail('step ' .. args.step .. ' takes no group; an empty batch is never trained') end

local headers = {}
for _, id in ipairs(args.groups) do
  local header = load(id)
  if not header or header.state ~= 'ready' then
    return fail('group ' .. id .. ' cannot be taken for step ' .. args.step .. ': it is ' .. (header and header.state or 'gone'))
  end
  if header.bound >= 0 and run.published - header.oldest > header.bound then
    return fail('group ' .. id .. ' has staleness ' .. run.published - header.oldest .. ', its bound is ' .. header.bound)
  end
  if headers[id] then return fail('group ' .. id .. ' is named twice for step ' .. args.step) end
  headers[id] = header
end
for _, header in pairs(headers) do
  header.state, header.step = 'taken', args.step
  save(header)
  count('buffered', -header.good)
  count('taken', header.good)
end
local packed = pack(args.groups)
call('HSET', STEPS, field, packed)
return packed
