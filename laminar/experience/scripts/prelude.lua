-- Put before every script. KEYS[1]: the run's key prefix. ARGV: request id, the arguments (msgpack), perhaps a payload.
-- A header is one outstanding group; README.md lists its fields and draws its states. Counters count trajectories.

local call, pack, unpack_value = redis.call, cmsgpack.pack, cmsgpack.unpack
local prefix, request, args, payload = KEYS[1], ARGV[1], unpack_value(ARGV[2]), ARGV[3]
local RUN, COUNTERS, EVENTS = prefix .. 'run', prefix .. 'counters', prefix .. 'events'
local HEADERS, OUTSTANDING, HELD = prefix .. 'headers', prefix .. 'outstanding', prefix .. 'held'
local LEASES, UNOWNED, REISSUE = prefix .. 'leases', prefix .. 'unowned', prefix .. 'reissue'
local STEPS, PROMPTS, CHANGES = prefix .. 'steps', prefix .. 'prompts', prefix .. 'changes'
local ANSWER_TTL_MS, MAX_EVENTS = 600000, 1000

local clock = call('TIME')
local now_us = tonumber(clock[1]) * 1000000 + tonumber(clock[2])
local now_ms = math.floor(now_us / 1000)

local run = {}
local flat_run = call('HGETALL', RUN)
for i = 1, #flat_run, 2 do
  run[flat_run[i]] = tonumber(flat_run[i + 1]) or flat_run[i + 1]
end

local function set(name, value)
  run[name] = value
  call('HSET', RUN, name, value)
end

-- A server that was restarted may have lost its last second or two, so a lineage is open in one life of the server only: nothing
-- is granted, taken or published until the trainer, who knows what it trained, has restored the run.
local function this_life()
  return 'life:' .. string.match(call('INFO', 'server'), '\nrun_id:(%x+)')
end

-- Nor does it stay open once its groups and their headers disagree: somebody, or an evicting server, has deleted a key.
local function is_open()
  return run.opened == this_life() and call('ZCARD', OUTSTANDING) == call('HLEN', HEADERS)
end

local function fail(text)
  return redis.error_reply('LAMINAR ' .. text)
end

-- Why the trainer of `args.lineage` may not go on; nil if it may.
local function fenced(what)
  if args.lineage ~= run.lineage then
    return fail(what .. ' belongs to lineage ' .. args.lineage .. ', the run is in lineage ' .. (run.lineage or 'none'))
  end
  if not is_open() then
    return fail(what .. ' waits: the server was restarted, or lost groups, and the trainer has not restored the run')
  end
end

-- Answers of requests that must not take effect twice are kept, and given again.
local function answered()
  return call('GET', prefix .. 'request:' .. request)
end

local function answer(value)
  local packed = pack(value)
  call('SET', prefix .. 'request:' .. request, packed, 'PX', ANSWER_TTL_MS)
  return packed
end

-- While a script runs for many requests, headers, counters and members are written once, at its end (`repeat.lua`).
local late

local function count(name, number)
  if number == 0 then return end
  if late then
    late.counts[name] = (late.counts[name] or 0) + number
  else
    call('HINCRBY', COUNTERS, name, number)
  end
end

-- A hash's fields, written at once. Of a hash of that many fields, `got` asks the server only if not all of them wait here.
local function put(key, field, value)
  if not late then return call('HSET', key, field, value) end
  local waiting = late.hashes[key] or { count = 0, values = {} }
  late.hashes[key] = waiting
  waiting.count, waiting.values[field] = waiting.count + 1, value
end

local function got(key, field, num_fields)
  local waiting = late and late.hashes[key]
  if waiting and (waiting.values[field] or waiting.count == num_fields) then return waiting.values[field] end
  return num_fields > 0 and call('HGET', key, field)
end

local function write_hashes()
  if not late then return end
  for key, waiting in pairs(late.hashes) do
    local flat = {}
    for field, value in pairs(waiting.values) do
      flat[#flat + 1] = field
      flat[#flat + 1] = value
    end
    call('HSET', key, unpack(flat))
  end
  late.hashes = {}
end

local function event(kind, group, detail)
  call('XADD', EVENTS, 'MAXLEN', '~', MAX_EVENTS, '*', 'kind', kind, 'group', group, 'detail', detail)
end

local function load(id)
  if late and late.headers[id] then return late.headers[id] end
  local packed = call('HGET', HEADERS, id)
  return packed and unpack_value(packed)
end

-- A reader that has seen a revision asks for what changed since: all that one script changes is one revision. They begin at the clock,
-- so that those of a run whose keys somebody deleted are never met again.
local has_changed = false

local function touch(id)
  if not run.pruned then set('pruned', now_us) end
  if not has_changed then set('revision', math.max((run.revision or 0) + 1, now_us)) end
  has_changed = true
  call('ZADD', CHANGES, run.revision, id)
end

local function save(header)
  if late then
    late.headers[header.id] = header
  else
    call('HSET', HEADERS, header.id, pack(header))
    touch(header.id)
  end
end

local function num_outstanding()
  return call('ZCARD', OUTSTANDING) + call('HLEN', HELD)
end

-- The inequality of admission. A bound below 0 stands for "unbounded".
local function fits(bound, outstanding, engine)
  return bound < 0 or outstanding < (bound + 1 - (run.published - engine)) * run.prompts_per_step
end

local function reserve(header, bytes)
  run.reserved = (run.reserved or 0) + bytes - header.reserved
  if late then late.reserved = true else set('reserved', run.reserved) end
  header.reserved = bytes
end

-- Small payloads come as arguments and share their group's key. Large ones have keys of their own, whose values a server keeps and
-- sends uncopied; their sender puts them beside the request beforehand, for a script copies each argument twice.
local LARGE_PAYLOAD = 16384

local function large_key(id, member)
  return prefix .. 'payload:' .. id .. ':' .. member
end

local function staged_key()
  return prefix .. 'staged:' .. request
end

-- False, and nothing is done, if the server had no memory for a large payload.
local function store_payload(id, member, size)
  if size < LARGE_PAYLOAD then
    put(prefix .. 'payloads:' .. id, member, payload)
    return true
  end
  if call('EXISTS', staged_key()) == 0 then return false end
  call('RENAME', staged_key(), large_key(id, member))
  call('PERSIST', large_key(id, member))
  return true
end

-- Deletes what a group's members stored; answers the bytes. `each` sees every good member's sampled tokens.
local function drop_payloads(id, each)
  write_hashes()
  local key, bytes = prefix .. 'members:' .. id, 0
  local flat = call('HGETALL', key)
  for i = 1, #flat, 2 do
    local _, _, size, tokens, good = unpack(unpack_value(flat[i + 1]))
    bytes = bytes + size
    if good and size >= LARGE_PAYLOAD then call('UNLINK', large_key(id, flat[i])) end
    if each and good then each(tokens) end
  end
  call('UNLINK', key, prefix .. 'payloads:' .. id)
  return bytes
end

-- What is stored of a running member's tokens: its description, the tokens in chunks beside it.
local function load_partial(id, member)
  local packed = call('HGET', prefix .. 'partials:' .. id, member)
  return packed and unpack_value(packed)
end

local function drop_partial(id, member)
  local partial = load_partial(id, member)
  if not partial then return end
  local fields = { member }
  for i = 0, partial.chunks - 1 do
    table.insert(fields, member .. ':' .. i)
  end
  for first = 1, #fields, 1000 do
    call('HDEL', prefix .. 'partials:' .. id, unpack(fields, first, math.min(first + 999, #fields)))
  end
end

-- Oldest and newest number of the tokens that a group in flight keeps when it changes hands; nil if there are none.
local function surviving(header)
  local oldest, newest = header.done_oldest, header.done_newest
  for member = 0, (header.has_partial and header.size or 0) - 1 do
    local partial = load_partial(header.id, member)
    if partial then
      oldest = math.min(oldest or partial.oldest, partial.oldest)
      newest = math.max(newest or partial.newest, partial.newest)
    end
  end
  return oldest, newest
end

local function forget(header)
  if late then late.headers[header.id] = nil end
  call('HDEL', HEADERS, header.id)
  touch(header.id)
  call('ZREM', OUTSTANDING, header.id)
  call('ZREM', LEASES, header.id)
  call('ZREM', UNOWNED, header.id)
end

-- What staleness made go, by sampled tokens: up to the power of two that names the bucket.
local function count_dropped(tokens)
  local bucket = 64
  while bucket < tokens do bucket = bucket * 2 end
  count('dropped_length:' .. bucket, 1)
end

-- What was still played counts with the tokens that it had put by; without any it has no length.
local function count_dropped_running(header)
  local unfinished = header.size - header.done
  for member = 0, (header.has_partial and header.size or 0) - 1 do
    local partial = load_partial(header.id, member)
    if partial then
      count_dropped(partial.count)
      unfinished = unfinished - 1
    end
  end
  count('dropped_length:unfinished', unfinished)
end

local IS_FOR_AGE = { stale = true, waited_too_long = true, fully_masked = true }

-- A group leaves without being trained. One that leaves a taken batch keeps its slot until that step is published.
local function leave(header, bucket, detail)
  local running = header.size - header.done
  count('running', -running)
  count(header.state == 'taken' and 'taken' or 'buffered', -header.good)
  count(bucket, running + header.good)
  if detail then count(bucket .. ':' .. detail, running + header.good) end
  if header.state == 'taken' then call('HSET', HELD, header.id, header.step) end
  reserve(header, 0)
  local is_dropped = bucket == 'evicted' and IS_FOR_AGE[detail]
  if is_dropped then count_dropped_running(header) end
  drop_payloads(header.id, is_dropped and count_dropped or nil)
  call('UNLINK', prefix .. 'partials:' .. header.id)
  forget(header)
  event(bucket, header.id, detail or '')
end

-- All members are done: the group is ready, or failed if too few of them are good.
local function complete(header)
  call('ZREM', LEASES, header.id)
  call('ZREM', UNOWNED, header.id)
  header.owner = ''
  if header.good < header.min_good then
    return leave(header, 'failed', 'too_few_siblings')
  end
  call('UNLINK', prefix .. 'partials:' .. header.id)
  header.state, header.oldest, header.newest = 'ready', header.done_oldest, header.done_newest
  save(header)
end

-- Leases that have ended, by the server's clock: the group may be claimed again, or is given up after the last attempt.
local function reap(ahead_ms)
  while true do
    local ids = call('ZRANGEBYSCORE', LEASES, '-inf', now_ms + ahead_ms, 'LIMIT', 0, 100)
    if #ids == 0 then return end
    for _, id in ipairs(ids) do
      local header = load(id)
      call('ZREM', LEASES, id)
      if header and header.attempt >= run.max_attempts then
        local missing = header.size - header.done
        count('running', -missing)
        count('failed', missing)
        count('failed:given_up', missing)
        event('given_up', id, header.owner)
        header.done = header.size
        reserve(header, header.bytes)
        complete(header)
      elseif header then
        header.last, header.owner, header.expired = header.owner, '', true
        save(header)
        call('ZADD', UNOWNED, header.admission, id)
      end
    end
  end
end

-- Whether no prompt is left to admit; steps over the end of an epoch.
local function end_of_data()
  if run.cursor >= run.num_prompts then
    set('epoch', run.epoch + 1)
    set('cursor', 0)
  end
  return run.max_epochs >= 0 and run.epoch >= run.max_epochs and call('LLEN', REISSUE) == 0
end
