-- One space's state transitions for a batch of messages; the reference is memory_store.py.
-- KEYS[1]  prefix of the space's keys (with its hash tag)
-- ARGV     epoch, now (ms), options (cmsgpack: pending_ttl, content_ttl, offload_ttl, max_pending, max_content in ms / blocks),
--          messages (cmsgpack: list of {sequence, {operation, ...}}), stream in which sequences count
-- Returns  cmsgpack {status, {{sequence, results or false}, ...}, capped_pending, capped_content}
local prefix, epoch, now = KEYS[1], tonumber(ARGV[1]), tonumber(ARGV[2])
local options, messages = cmsgpack.unpack(ARGV[3]), cmsgpack.unpack(ARGV[4])
local pending_ttl, content_ttl, offload_ttl = options[1], options[2], options[3]
local max_pending, max_content = options[4], options[5]
local meta, pending, deadlines, poor = prefix .. 'meta', prefix .. 'pending', prefix .. 'deadlines', prefix .. 'poor'
local CHUNK = 1000
local SLICES = 4
local capped_pending, capped_content = 0, 0

local known = redis.call('HMGET', meta, 'epoch', 'applied', 'outbox', 'stream')
if known[1] and epoch < tonumber(known[1]) then
  return cmsgpack.pack({'fenced'})
end
local same_stream = (known[4] or '0') == ARGV[5]
local applied = same_stream and tonumber(known[2] or '0') or 0
local earlier = {}
if known[3] and same_stream then
  for _, entry in ipairs(cmsgpack.unpack(known[3])) do
    earlier[entry[1]] = entry[2]
  end
end
