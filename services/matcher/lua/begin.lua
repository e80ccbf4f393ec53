-- One space's state transitions for a batch of messages; the reference is memory_store.py.
-- KEYS[1]  prefix of the space's keys (with its hash tag)
-- ARGV     epoch, stream (when KV_EVENTS was created, ms), now (ms),
--          options (cmsgpack: pending_ttl, content_ttl, offload_ttl, max_pending, max_content in ms / blocks),
--          messages (cmsgpack: list of {sequence, {operation, ...}, publisher's group, generation, lowest generation})
-- Returns  cmsgpack {status, {{sequence, {verdict, results} or false}, ...}, capped_pending, capped_content}
local prefix, epoch, stream, now = KEYS[1], tonumber(ARGV[1]), ARGV[2], tonumber(ARGV[3])
local options, messages = cmsgpack.unpack(ARGV[4]), cmsgpack.unpack(ARGV[5])
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
-- Sequences count within one stream: what was applied of another says nothing of this one.
local same_stream = known[4] == stream
local applied = same_stream and tonumber(known[2] or '0') or 0
local before, earlier = {}, {}
if same_stream and known[3] then
  before = cmsgpack.unpack(known[3])
  for _, entry in ipairs(before) do
    earlier[entry[1]] = entry[2]
  end
end
