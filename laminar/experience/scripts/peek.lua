#!lua flags=allow-oom
-- All outstanding groups. The headers are answered as they are stored, and sorted by the caller.
reap(0)
local flat_counters = call('HGETALL', COUNTERS)
return {
  pack({
    lineage = math.max(run.lineage, 0),
    published = run.published,
    open = run.opened == 1,
    end_of_data = end_of_data(),
    held = call('HLEN', HELD),
    reserved = run.reserved,
    counters = flat_counters,
  }),
  call('HVALS', HEADERS),
}
