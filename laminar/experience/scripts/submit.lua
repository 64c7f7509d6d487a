#!lua
-- args, a list: group, member, attempt, worker, good, kind, text, bytes, tokens, oldest, newest, waited_ms.
-- The request id is kept in the member's record: a repeated request is known by it for as long as the group exists.
-- Answers false if the server had no memory for a payload that was to be staged.
local group, member, attempt, worker, good, kind, text, bytes, tokens, oldest, newest, waited_ms = unpack(args)

local function refuse(outcome)
  if bytes >= LARGE_PAYLOAD then call('UNLINK', staged_key()) end
  return pack(outcome)
end

local stored = not good and answered()
if stored then return stored end

local header = load(group)
if not header then return refuse('refused_unknown') end
if member < 0 or member >= header.size then
  return fail('group ' .. group .. ' has ' .. header.size .. ' members, there is no member ' .. member)
end
local members = prefix .. 'members:' .. group
local earlier = got(members, member, header.done)
if earlier then
  if unpack_value(earlier)[1] == request then return refuse('accepted') end
  return refuse('duplicate')
end
if header.state ~= 'in_flight' then return refuse('duplicate') end

-- While nobody else has claimed the group, a worker whose lease ended is still as good as its owner.
local is_owner = header.owner == worker or (header.expired and header.last == worker)
if not is_owner then
  if not good then return refuse('refused_lost') end
  if header.bound >= 0 and run.published - oldest > header.bound then return refuse('refused_stale') end
  if not fits(header.bound, num_outstanding() - 1, oldest) then return refuse('refused_lost') end
end

-- Refill: the member is not over, it is to be played again; as often in all as the group has members. A bug would only repeat.
if not good and run.group_failure == 'refill' and kind ~= 'user_bug' and (header.refills or 0) < header.size then
  header.refills = (header.refills or 0) + 1
  save(header)
  count('refilled', 1)
  event('refilled', group, kind .. ': ' .. text)
  return answer('replay')
end

if good and not store_payload(group, member, bytes) then return false end
put(members, member, pack({ request, attempt, bytes, tokens, good }))
if header.has_partial then drop_partial(group, member) end
count('running', -1)
count('waited_for_memory_ms', waited_ms)
header.done = header.done + 1
if good then
  count('buffered', 1)
  header.good, header.bytes = header.good + 1, header.bytes + bytes
  header.done_oldest = math.min(header.done_oldest or oldest, oldest)
  header.done_newest = math.max(header.done_newest or newest, newest)
  header.oldest, header.newest = math.min(header.oldest, oldest), math.max(header.newest, newest)
else
  count('failed', 1)
  count('failed:' .. kind, 1)
  event('failure', group, kind .. ': ' .. text)
end
-- Too few can still be good: the members that are being played are of no use any more.
if header.size - header.done + header.good < header.min_good then
  leave(header, 'failed', 'too_few_siblings')
  return pack('accepted')
end
reserve(header, header.bytes + (header.size - header.done) * math.floor(run.bytes_per_group / header.size))
if header.done == header.size then complete(header) else save(header) end
return pack('accepted')
