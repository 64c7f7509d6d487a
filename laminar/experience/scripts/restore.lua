#!lua flags=allow-oom
-- args: lineage, number, frontier = {lineage, epoch, cursor, next_admission, pending = {{epoch, position, reissues}, ...}, counters = {name, n, ...}}.
-- Opens a lineage at a number, for this life of the server. What the frontier holds for trained stays so; complete groups without newer
-- tokens are kept, also those of a batch that was taken and not trained; everything else is evicted as orphaned, and its prompt issued
-- again, once. An occurrence of a prompt is known by its epoch and position.
if not run.next_admission then return fail('run is not configured yet, so it cannot be restored') end
if is_open() and args.lineage == run.lineage and args.number == run.restored then
  return call('GET', prefix .. 'restored')
end
if args.lineage <= run.lineage then
  return fail('lineage ' .. args.lineage .. ' cannot be opened: the run is in lineage ' .. run.lineage)
end

local FORGOTTEN_ADMISSIONS = 10000
local frontier = args.frontier
local is_pending = {}
for _, entry in ipairs(frontier.pending) do
  is_pending[entry[1] .. '.' .. entry[2]] = true
end

local function is_untrained(header)
  local is_beyond = header.epoch > frontier.epoch or (header.epoch == frontier.epoch and header.position >= frontier.cursor)
  return is_beyond or is_pending[header.epoch .. '.' .. header.position]
end

-- Answers the kept headers by id, their places, and the report.
local function keep_or_orphan()
  local kept, kept_places, report = {}, {}, { kept = 0, orphaned = 0, reissued = 0 }
  for _, packed in ipairs(call('HVALS', HEADERS)) do
    local header = unpack_value(packed)
    if header.state ~= 'in_flight' and header.newest <= args.number and is_untrained(header) then
      if header.state == 'taken' then
        header.state, header.step = 'ready', nil
        save(header)
      end
      kept[header.id] = header
      kept_places[header.epoch .. '.' .. header.position] = true
      report.kept = report.kept + 1
    else
      leave(header, 'evicted', 'orphaned')
      report.orphaned = report.orphaned + 1
    end
  end
  return kept, kept_places, report
end

local function free_trained_steps(kept)
  local flat = call('HGETALL', STEPS)
  for i = 2, #flat, 2 do
    for _, id in ipairs(unpack_value(flat[i])) do
      if not kept[id] then drop_payloads(id) end
    end
  end
  call('DEL', STEPS, HELD)
end

-- What follows from the headers is made anew: a key that somebody deleted must not leave slots or bytes taken for good.
local function follow_headers(kept, report)
  for _, id in ipairs(call('ZRANGE', OUTSTANDING, 0, -1)) do
    if not kept[id] then -- its header is lost
      drop_payloads(id)
      call('UNLINK', prefix .. 'partials:' .. id)
      touch(id)
      event('evicted', id, 'orphaned')
      report.orphaned = report.orphaned + 1
    end
  end
  call('DEL', OUTSTANDING, LEASES, UNOWNED)
  local buffered, reserved = 0, 0
  for id, header in pairs(kept) do
    call('ZADD', OUTSTANDING, header.admission, id)
    buffered, reserved = buffered + header.good, reserved + header.reserved
  end
  set('reserved', reserved)
  return buffered
end

-- Prompts before the frontier that wait, then those between the frontier and the live cursor, without the kept ones.
local function issue_again(kept_places, report)
  local function issue(epoch, position, reissues)
    if not kept_places[epoch .. '.' .. position] then
      call('RPUSH', REISSUE, pack({ epoch, position, reissues }))
      report.reissued = report.reissued + 1
    end
  end
  call('DEL', REISSUE)
  for _, entry in ipairs(frontier.pending) do
    issue(entry[1], entry[2], entry[3])
  end
  local epoch, position = frontier.epoch, frontier.cursor
  while epoch < run.epoch or (epoch == run.epoch and position < run.cursor) do
    if position >= run.num_prompts then
      epoch, position = epoch + 1, 0
    else
      issue(epoch, position, 0)
      position = position + 1
    end
  end
  set('epoch', epoch)
  set('cursor', position)
end

-- How many prompts that are not trained at the frontier are now nowhere; it must be 0.
local function count_lost(live_epoch, live_cursor)
  local present = {}
  for _, packed in ipairs(call('LRANGE', REISSUE, 0, -1)) do
    local entry = unpack_value(packed)
    present[entry[1] .. '.' .. entry[2]] = true
  end
  for _, packed in ipairs(call('HVALS', HEADERS)) do
    local header = unpack_value(packed)
    present[header.epoch .. '.' .. header.position] = true
  end
  local lost = 0
  for place in pairs(is_pending) do
    if not present[place] then lost = lost + 1 end
  end
  for epoch = frontier.epoch, live_epoch do
    local first = epoch == frontier.epoch and frontier.cursor or 0
    local last = epoch == live_epoch and live_cursor or run.num_prompts
    for position = first, last - 1 do
      if not present[epoch .. '.' .. position] then lost = lost + 1 end
    end
  end
  return lost
end

-- The trained ones are the frontier's. What was admitted and is in no other bucket was orphaned.
local function settle_counters(buffered)
  local then_counted, live = {}, {}
  for i = 1, #frontier.counters, 2 do
    then_counted[frontier.counters[i]] = tonumber(frontier.counters[i + 1])
  end
  if run.next_admission < frontier.next_admission then
    call('DEL', COUNTERS)
    for name, number in pairs(then_counted) do
      call('HSET', COUNTERS, name, number)
    end
    set('next_admission', frontier.next_admission)
  end
  call('HSET', COUNTERS, 'running', 0, 'taken', 0, 'buffered', buffered, 'trained', then_counted.trained or 0)
  for _, name in ipairs({ 'admitted', 'buffered', 'trained', 'evicted', 'filtered', 'failed' }) do
    live[name] = tonumber(call('HGET', COUNTERS, name) or 0)
  end
  local orphaned = live.admitted - live.buffered - live.trained - live.evicted - live.filtered - live.failed
  count('evicted', orphaned)
  count('evicted:orphaned', orphaned)
end

local kept, kept_places, report = keep_or_orphan()
free_trained_steps(kept)
local buffered = follow_headers(kept, report)
local live_epoch, live_cursor = run.epoch, run.cursor
issue_again(kept_places, report)
report.lost = count_lost(live_epoch, live_cursor)
settle_counters(buffered)
set('lineage', args.lineage)
set('published', args.number)
set('restored', args.number)
-- Groups that the server has forgotten may still be played: their ids are not given out a second time. Each lineage since the
-- frontier's may have given some that even the server before this one had forgotten.
if args.lineage > 0 and run.opened ~= this_life() then
  local beyond_all = frontier.next_admission + FORGOTTEN_ADMISSIONS * (args.lineage - frontier.lineage)
  set('next_admission', math.max(run.next_admission + FORGOTTEN_ADMISSIONS, beyond_all))
end
set('opened', this_life())
local packed = pack(report)
call('SET', prefix .. 'restored', packed)
return packed
