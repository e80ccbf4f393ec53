-- Removes waiting entries whose time is over, and content slices that nobody reads any more (in the background of the
-- server: expiry of a large hash would stop it).
-- KEYS[1] prefix of the space's keys; ARGV epoch, now (ms), limit (blocks), content_ttl, offload_ttl, teacher_ttl (ms)
-- Returns cmsgpack {status, {{name, holder, tier}, ...}}
local prefix, epoch, now, limit = KEYS[1], tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local known = redis.call('HGET', prefix .. 'meta', 'epoch')
if known and epoch < tonumber(known) then
  return cmsgpack.pack({'fenced'})
end
local SLICES = 4
for family, ttl in pairs({content = tonumber(ARGV[4]), offload = tonumber(ARGV[5])}) do
  local current = math.floor(now / math.max(1, math.floor(ttl / SLICES)))
  local old = {}
  for age = SLICES + 2, 4 * SLICES + 1 do
    old[#old + 1] = prefix .. family .. ':' .. (current - age)
  end
  redis.call('UNLINK', unpack(old))
end
local pending, deadlines, expired = prefix .. 'pending', prefix .. 'deadlines', {}
for _, name in ipairs(redis.call('ZRANGEBYSCORE', deadlines, '-inf', now, 'LIMIT', 0, limit)) do
  local value = redis.call('HGET', pending, name)
  if value then
    for _, entry in ipairs(cmsgpack.unpack(value)) do
      expired[#expired + 1] = {name, entry[1], entry[2]}
      if redis.call('HEXISTS', prefix .. 'poor', name) == 0 then
        local holder = entry[1]
        local group = holder
        if string.sub(holder, 1, 1) ~= 'W' then
          group = 'P' .. string.match(string.sub(holder, 2), '^(.*)%z')
        end
        redis.call('SREM', prefix .. 'group:' .. group, name)
      end
    end
    redis.call('HDEL', pending, name)
  end
  redis.call('ZREM', deadlines, name)
end
-- Names of teachers that no content refers to any more.
local teachers, times = prefix .. 'teachers', prefix .. 'teacher_times'
local gone = redis.call('ZRANGEBYSCORE', times, '-inf', now - tonumber(ARGV[6]), 'LIMIT', 0, limit)
for _, teacher_id in ipairs(gone) do
  redis.call('HDEL', teachers, teacher_id)
  redis.call('ZREM', times, teacher_id)
end
if redis.call('HLEN', teachers) > redis.call('ZCARD', times) then
  -- Written by a release that did not note their times.
  for _, teacher_id in ipairs(redis.call('HKEYS', teachers)) do
    redis.call('ZADD', times, 'NX', now, teacher_id)
  end
end
-- Nobody waits and nothing is poor: whatever groups still name went with a key that expired as a whole.
if redis.call('EXISTS', pending) == 0 and redis.call('EXISTS', prefix .. 'poor') == 0 then
  for _, group in ipairs(redis.call('SMEMBERS', prefix .. 'groups')) do
    redis.call('UNLINK', prefix .. 'group:' .. group)
  end
  redis.call('DEL', prefix .. 'groups')
end
return cmsgpack.pack({'ok', expired})
