#!lua flags=allow-oom
-- args: life, revision: what the caller saw last. Answers the headers that changed since, as they are stored, and the groups that
-- left; all headers if that was in another life of the server, or too long ago.
if not run.next_admission then
  local meta = { lineage = -1, published = 0, open = false, end_of_data = false, held = 0, reserved = 0, counters = {} }
  meta.life, meta.revision, meta.whole = '', 0, true
  return { pack(meta), {}, {} }
end
reap(0)

local function changed()
  local stored, gone = {}, {}
  local ids = call('ZRANGEBYSCORE', CHANGES, string.format('(%.0f', args.revision), '+inf')
  for first = 1, #ids, 1000 do
    local last = math.min(first + 999, #ids)
    for i, packed in ipairs(call('HMGET', HEADERS, unpack(ids, first, last))) do
      if packed then table.insert(stored, packed) else table.insert(gone, ids[first + i - 1]) end
    end
  end
  return stored, gone
end

-- Groups that left stay among the changes until they outnumber the others.
local function prune()
  if call('ZCARD', CHANGES) <= 2 * call('HLEN', HEADERS) + 1000 then return end
  for _, id in ipairs(call('ZRANGE', CHANGES, 0, -1)) do
    if call('HEXISTS', HEADERS, id) == 0 then call('ZREM', CHANGES, id) end
  end
  set('pruned', run.revision)
end

local life = this_life()
local is_whole = args.life ~= life or args.revision < (run.pruned or 0) or args.revision > (run.revision or 0)
local stored, gone = {}, {}
if is_whole then stored = call('HVALS', HEADERS) else stored, gone = changed() end
prune()
local is_end, prompts_left = end_of_data(), nil
if run.max_epochs >= 0 then
  prompts_left = (run.max_epochs - run.epoch) * run.num_prompts - run.cursor + call('LLEN', REISSUE)
end
return {
  pack({
    lineage = run.lineage,
    published = run.published,
    open = is_open(),
    end_of_data = is_end,
    prompts_left = prompts_left,
    held = call('HLEN', HELD),
    reserved = run.reserved,
    paused = run.paused == 1,
    bound = run.bound,
    counters = call('HGETALL', COUNTERS),
    life = life,
    revision = run.revision or 0,
    whole = is_whole,
  }),
  stored,
  gone,
}
