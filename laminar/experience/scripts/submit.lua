#!lua
-- args: group, member, attempt, worker, good, kind, text, bytes, oldest, newest, payload (key without prefix), waited_ms.
-- The request id is kept in the member's record: a repeated request is known by it for as long as the group exists.
local function refuse(outcome)
  return pack(outcome)
end

local header = load(args.group)
if not header then return refuse('refused_unknown') end
if args.member < 0 or args.member >= header.size then
  return fail('group ' .. args.group .. ' has ' .. header.size .. ' members, there is no member ' .. args.member)
end
local members = prefix .. 'members:' .. args.group
local earlier = call('HGET', members, args.member)
if earlier then
  if unpack_value(earlier).request == request then return pack('accepted') end
  return refuse('duplicate')
end
if header.state ~= 'in_flight' then return refuse('duplicate') end

-- While nobody else has claimed the group, a worker whose lease ended is still as good as its owner.
local is_owner = header.owner == args.worker or (header.expired and header.last == args.worker)
if not is_owner then
  if not args.good then return refuse('refused_lost') end
  if header.bound >= 0 and run.published - args.oldest > header.bound then return refuse('refused_stale') end
  if not fits(header.bound, num_outstanding() - 1, args.oldest) then return refuse('refused_lost') end
end

if args.good then call('SET', prefix .. args.payload, payload) end
call('HSET', members, args.member, pack({
  request = request, attempt = args.attempt, bytes = args.bytes, payload = args.good and args.payload or nil,
}))
if header.has_partial then drop_partial(args.group, args.member) end
count('running', -1)
count('waited_for_memory_ms', args.waited_ms)
header.done = header.done + 1
if args.good then
  count('buffered', 1)
  header.good, header.bytes = header.good + 1, header.bytes + args.bytes
  header.done_oldest = math.min(header.done_oldest or args.oldest, args.oldest)
  header.done_newest = math.max(header.done_newest or args.newest, args.newest)
  header.oldest, header.newest = math.min(header.oldest, args.oldest), math.max(header.newest, args.newest)
else
  count('failed', 1)
  count('failed:' .. args.kind, 1)
  event('failure', args.group, args.kind .. ': ' .. args.text)
end
reserve(header, header.bytes + (header.size - header.done) * math.floor(run.bytes_per_group / header.size))
if header.done == header.size then complete(header) else save(header) end
return pack('accepted')
