#!lua flags=allow-oom
-- args: ahead_ms.
reap(args.ahead_ms)
return pack(true)
