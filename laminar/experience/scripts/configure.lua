#!lua
-- Settings of the run; the first call makes the run, a later one (resume) may change all but the data's identity.
if run.data and run.data ~= args.data then
  return fail('run holds prompts of other data: ' .. run.data .. ', not ' .. args.data)
end
for name, value in pairs(args) do
  set(name, value)
end
if not run.next_admission then
  for name, value in pairs({ opened = 0, lineage = -1, published = 0, restored = 0, epoch = 0, cursor = 0, next_admission = 0, reserved = 0 }) do
    set(name, value)
  end
end
return pack(true)
