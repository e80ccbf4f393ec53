-- Forgets the generations of publishers that are gone for good.
-- KEYS[1] prefix of the space's keys; ARGV epoch, groups (cmsgpack list). Returns cmsgpack {status}
local prefix, epoch = KEYS[1], tonumber(ARGV[1])
local known = redis.call('HGET', prefix .. 'meta', 'epoch')
if known and epoch < tonumber(known) then
  return cmsgpack.pack({'fenced'})
end
for _, group in ipairs(cmsgpack.unpack(ARGV[2])) do
  redis.call('HDEL', prefix .. 'generations', group)
end
return cmsgpack.pack({'ok'})
