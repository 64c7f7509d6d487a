#!lua flags=allow-oom
-- args: worker, groups. The groups may be claimed at once by others, and the attempt does not count.
for _, id in ipairs(args.groups) do
  local header = load(id)
  if header and header.state == 'in_flight' and header.owner == args.worker then
    header.owner, header.last, header.expired = '', '', false
    save(header)
    call('ZREM', LEASES, id)
    call('ZADD', UNOWNED, header.admission, id)
  end
end
return pack(true)
