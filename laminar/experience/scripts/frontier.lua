#!lua flags=allow-oom
-- Which prompts are trained: all before the cursor but the pending ones, in the order in which they are to be issued again.
if not is_open() then return fail('the data cursor is not known before the run is restored') end
end_of_data()
local pending = {}
for _, id in ipairs(call('ZRANGE', OUTSTANDING, 0, -1)) do
  local header = load(id)
  table.insert(pending, { header.epoch, header.position, header.reissues })
end
for _, packed in ipairs(call('LRANGE', REISSUE, 0, -1)) do
  table.insert(pending, unpack_value(packed))
end
return pack({
  lineage = math.max(run.lineage, 0), number = run.published, epoch = run.epoch, cursor = run.cursor,
  next_admission = run.next_admission, pending = pending, counters = call('HGETALL', COUNTERS),
})
