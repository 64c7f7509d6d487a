#!lua
-- args: group, member, attempt, worker, good, kind, text, bytes, tokens, oldest, newest, payload (key without prefix), waited_ms.
-- The request id is kept in the member's record: a repeated request is known by it for as long as the group exists.
local function refuse(outcome)
  return pack(outcome)
end

local stored = not args.good and answered()
if stored then return stored end

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

-- Refill: the member is not over, it is to be played again; as often in all as the group has members. A bug would only repeat.
if not args.good and run.group_failure == 'refill' and args.kind ~= 'user_bug' and (header.refills or 0) < header.size then
  header.refills = (header.refills or 0) + 1
  save(header)
  count('refilled', 1)
  event('refilled', args.group, args.kind .. ': ' .. args.text)
  return answer('replay')
end

if args.good then call('SET', prefix .. args.payload, payload) end
call('HSET', members, args.member, pack({
  request = request, attempt = args.attempt, bytes = args.bytes, tokens = args.tokens, payload = args.good and args.payload or nil,
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
-- Too few can still be good: the members that are being played are of no use any more.
if header.size - header.done + header.good < header.min_good then
  leave(header, 'failed', 'too_few_siblings')
  return pack('accepted')
end
reserve(header, header.bytes + (header.size - header.done) * math.floor(run.bytes_per_group / header.size))
if header.done == header.size then complete(header) else save(header) end
return pack('accepted')
