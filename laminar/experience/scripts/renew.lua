#!lua flags=allow-oom
-- args: worker, lease_ms, groups = {{id, oldest, newest}, ...} (-1: not known). Answers the groups that the worker has lost.
-- A lease that ended is had again if nobody has claimed the group since.
local lost = {}
for _, listed in ipairs(args.groups) do
  local id, oldest, newest = listed[1], listed[2], listed[3]
  local header = load(id)
  local mine = header and header.state == 'in_flight'
    and (header.owner == args.worker or (header.expired and header.last == args.worker))
  if mine then
    header.owner, header.expired = args.worker, false
    if oldest >= 0 then header.oldest = math.max(header.oldest, math.min(oldest, header.done_oldest or oldest)) end
    header.newest = math.max(header.newest, newest)
    save(header)
    call('ZREM', UNOWNED, id)
    call('ZADD', LEASES, now_ms + args.lease_ms, id)
  else
    table.insert(lost, id)
  end
end
return pack(lost)
