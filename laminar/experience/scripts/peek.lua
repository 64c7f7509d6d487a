#!lua flags=allow-oom
-- All outstanding groups. The headers are answered as they are stored, and sorted by the caller.
if not run.next_admission then
  return { pack({ lineage = -1, published = 0, open = false, end_of_data = false, held = 0, reserved = 0, counters = {} }), {} }
end
reap(0)
local flat_counters = call('HGETALL', COUNTERS)
return {
  pack({
    lineage = run.lineage,
    published = run.published,
    open = is_open(),
    end_of_data = end_of_data(),
    held = call('HLEN', HELD),
    reserved = run.reserved,
    paused = run.paused == 1,
    bound = run.bound,
    counters = flat_counters,
  }),
  call('HVALS', HEADERS),
}
