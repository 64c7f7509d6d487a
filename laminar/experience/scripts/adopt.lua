#!lua flags=allow-oom
-- args: group, claim. What earlier owners left of the missing members, to the holder of the newest claim: {member, attempt, chunks}, ...
local header = load(args.group)
if not header or header.state ~= 'in_flight' or header.claim ~= args.claim then
  return {}
end
local found, key = {}, prefix .. 'partials:' .. args.group
for member = 0, header.size - 1 do
  local partial = load_partial(args.group, member)
  if partial then
    local chunks = {}
    for i = 0, partial.chunks - 1 do
      table.insert(chunks, call('HGET', key, member .. ':' .. i))
    end
    table.insert(found, { member, partial.attempt, chunks })
  end
end
return found
