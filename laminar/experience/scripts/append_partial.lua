#!lua
-- args: group, member, claim, attempt, offset, count, oldest, newest; payload: a chunk of a running member's tokens.
-- They are known by their offset: a repeated append changes nothing. A later attempt replaces an earlier one's tokens.
local header = load(args.group)
if not header or header.state ~= 'in_flight' or header.claim ~= args.claim
  or call('HEXISTS', prefix .. 'members:' .. args.group, args.member) == 1 then
  return pack('lost')
end
local partial = load_partial(args.group, args.member)
if partial and args.attempt < partial.attempt then return pack('lost') end
if partial and args.attempt > partial.attempt then
  drop_partial(args.group, args.member)
  partial = nil
end
partial = partial
  or { attempt = args.attempt, count = 0, chunks = 0, bytes = 0, oldest = args.oldest, newest = args.newest }
if args.offset + args.count <= partial.count then return pack('appended') end
if args.offset ~= partial.count then return pack('lost') end
-- Room for one payload a member was reserved at the claim; a partial lives within it.
if partial.bytes + #payload > math.floor(run.bytes_per_group / header.size) then return pack('full') end
if not header.has_partial then
  header.has_partial = true
  save(header)
end
local key = prefix .. 'partials:' .. args.group
call('HSET', key, args.member .. ':' .. partial.chunks, payload)
partial.count, partial.chunks, partial.bytes = partial.count + args.count, partial.chunks + 1, partial.bytes + #payload
partial.oldest, partial.newest = math.min(partial.oldest, args.oldest), math.max(partial.newest, args.newest)
call('HSET', key, args.member, pack(partial))
return pack('appended')
