#!lua flags=allow-oom
-- args: groups, bucket ('evicted' or 'filtered'), reason, reissue, max_reissues. Answers the groups that left by this request.
local stored = answered()
if stored then return stored end
local left = {}
for _, id in ipairs(args.groups) do
  local header = load(id)
  if header and args.bucket == 'filtered' and header.state == 'in_flight' then
    return fail('group ' .. id .. ' is in flight and cannot be filtered')
  end
end
for _, id in ipairs(args.groups) do
  local header = load(id)
  if header then
    leave(header, args.bucket, args.reason)
    table.insert(left, id)
    if args.reissue and header.reissues < args.max_reissues then
      call('RPUSH', REISSUE, pack({ header.epoch, header.position, header.reissues + 1 }))
      count('reissued', header.size)
    elseif args.reissue then
      count('abandoned', header.size)
      event('abandoned', id, 'issued again ' .. header.reissues .. ' times')
    end
  end
end
return answer(left)
