#!lua flags=allow-oom
-- args: worker, lineage, number, max_groups, lease_ms. Grants groups, those to be played again first.
local stored = answered()
if stored then return stored end

local granted = {}

local function finish(refused, need_epoch)
  if refused and #granted == 0 then count('refused:' .. refused, 1) end
  local value = {
    groups = granted,
    refused = refused,
    need_epoch = need_epoch,
    data = run.data,
    lineage = math.max(run.lineage or 0, 0),
    published = run.published or 0,
  }
  return #granted > 0 and answer(value) or pack(value)
end

if not is_open() or args.lineage > run.lineage or call('HLEN', PROMPTS) < run.num_prompts then
  return finish('not_ready')
end
if args.lineage < run.lineage then return finish('old_lineage') end
if run.paused == 1 then return finish('paused') end
if args.number > run.published then
  return fail('engine holds number ' .. args.number .. ', but only ' .. run.published .. ' is published')
end

local function grant(header)
  header.owner, header.expired, header.claim = args.worker, false, (header.claim or 0) + 1
  save(header)
  call('ZREM', UNOWNED, header.id)
  call('ZADD', LEASES, now_ms + args.lease_ms, header.id)
  local missing = {}
  for member = 0, header.size - 1 do
    if header.done == 0 or call('HEXISTS', prefix .. 'members:' .. header.id, member) == 0 then
      table.insert(missing, member)
    end
  end
  table.insert(granted, {
    group_id = header.id,
    admission = header.admission,
    prompt = header.prompt,
    members = missing,
    attempt = header.attempt,
    claim = header.claim,
  })
end

reap(0)
for _, id in ipairs(call('ZRANGE', UNOWNED, 0, 255)) do
  if #granted >= args.max_groups then break end
  local header = load(id)
  local oldest, newest = surviving(header)
  if args.number >= (oldest or header.oldest) or fits(header.bound, num_outstanding() - 1, args.number) then
    header.oldest = math.min(oldest or args.number, args.number)
    header.newest = math.max(newest or args.number, args.number)
    if header.expired then header.attempt = header.attempt + 1 end
    grant(header)
  end
end

-- A wrong estimate of a group's bytes must not stop the run: with nothing left to train or to free, one batch is always admitted.
local function bytes_refuse()
  return run.reserved + run.bytes_per_group > run.max_bytes
    and not (num_outstanding() < run.prompts_per_step and call('HLEN', STEPS) == 0)
end

local function order_of(epoch) return prefix .. 'order:' .. epoch end

local function prompt_at(epoch, position)
  local packed = call('GETRANGE', order_of(epoch), position * 4, position * 4 + 3)
  return #packed == 4 and (struct.unpack('<i4', packed)) or nil
end

local min_good = run.group_failure == 'drop' and run.group_size or math.min(run.min_group_size, run.group_size)
while #granted < args.max_groups do
  if not fits(run.bound, num_outstanding(), args.number) then return finish('staleness') end
  if bytes_refuse() then return finish('bytes') end
  if end_of_data() then return finish('end_of_data') end
  local epoch, position, reissues = run.epoch, run.cursor, 0
  local again = call('LINDEX', REISSUE, 0)
  if again then epoch, position, reissues = unpack(unpack_value(again)) end
  local prompt = prompt_at(epoch, position)
  -- The caller writes the order and asks again; what is granted already goes out first.
  if not prompt then return finish(nil, #granted == 0 and epoch or nil) end
  if again then call('LPOP', REISSUE) else set('cursor', position + 1) end
  if position == 0 then call('UNLINK', order_of(epoch - 1)) end -- that pass is over; a prompt issued again has it made anew
  local admission = run.next_admission
  set('next_admission', admission + 1)
  local header = {
    id = string.format('%08d', admission), admission = admission, state = 'in_flight', bound = run.exempt == 1 and -1 or run.bound,
    epoch = epoch, position = position, prompt = prompt, reissues = reissues,
    oldest = args.number, newest = args.number, attempt = 1, last = '',
    size = run.group_size, min_good = min_good, done = 0, good = 0,
    bytes = 0, reserved = 0,
  }
  reserve(header, run.bytes_per_group)
  call('ZADD', OUTSTANDING, admission, header.id)
  count('admitted', header.size)
  count('running', header.size)
  grant(header)
end
return finish(nil)
