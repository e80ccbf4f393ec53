-- Who waits for a block's content, and who was confirmed with the poorer content of an offload event.
local function write_pending(name, entries)
  if #entries == 0 then
    redis.call('HDEL', pending, name)
    redis.call('ZREM', deadlines, name)
    return
  end
  local latest = 0
  for _, entry in ipairs(entries) do
    latest = math.max(latest, entry[3])
  end
  redis.call('HSET', pending, name, cmsgpack.pack(entries))
  redis.call('ZADD', deadlines, latest, name)
end

-- What is forgotten together: a worker, or all locations of a pool.
local function group_of(holder)
  if string.sub(holder, 1, 1) == 'W' then
    return holder
  end
  return 'P' .. string.match(string.sub(holder, 2), '^(.*)%z')
end

local function join_group(holder, name)
  local group = group_of(holder)
  redis.call('SADD', prefix .. 'group:' .. group, name)
  redis.call('SADD', prefix .. 'groups', group)
end

-- A group's set names the blocks for which it waits or was confirmed with offload content.
local function leave_groups(name, entries)
  local still = {}
  for _, value in ipairs({redis.call('HGET', pending, name), redis.call('HGET', poor, name)}) do
    if value then
      local entry = cmsgpack.unpack(value)
      for _, one in ipairs(type(entry[1]) == 'table' and entry or entry[2]) do
        still[group_of(one[1])] = true
      end
    end
  end
  for _, entry in ipairs(entries) do
    local group = group_of(entry[1])
    if not still[group] then
      redis.call('SREM', prefix .. 'group:' .. group, name)
      if redis.call('EXISTS', prefix .. 'group:' .. group) == 0 then
        redis.call('SREM', prefix .. 'groups', group)
      end
    end
  end
end

local function mark_poor(name, record, waiting)
  local value = redis.call('HGET', poor, name)
  local entry = value and cmsgpack.unpack(value) or {record, {}}
  for _, one in ipairs(entry[2]) do
    if one[1] == waiting[1] and one[2] == waiting[2] then
      return
    end
  end
  if not value and redis.call('HLEN', poor) >= max_pending then
    return
  end
  table.insert(entry[2], {waiting[1], waiting[2]})
  redis.call('HSET', poor, name, cmsgpack.pack(entry))
  redis.call('PEXPIRE', poor, 2 * offload_ttl)
  join_group(waiting[1], name)
end

-- Records: kind, end (ms, big-endian double), has parent, parent, content, root, teacher.
local function same_place(one, other)
  return string.sub(one, 10, 34) == string.sub(other, 10, 34)
end

local function wait(name, holder, tier)
  local value = redis.call('HGET', pending, name)
  local entries = value and cmsgpack.unpack(value) or {}
  if not value and redis.call('HLEN', pending) >= max_pending then
    local oldest = redis.call('ZPOPMIN', deadlines)
    if oldest[1] then
      local dropped = cmsgpack.unpack(redis.call('HGET', pending, oldest[1]))
      redis.call('HDEL', pending, oldest[1])
      leave_groups(oldest[1], dropped)
      capped_pending = capped_pending + 1
    end
  end
  local deadline = now + pending_ttl
  for _, entry in ipairs(entries) do
    if entry[1] == holder and entry[2] == tier then
      entry[3] = deadline
      write_pending(name, entries)
      return
    end
  end
  entries[#entries + 1] = {holder, tier, deadline}
  write_pending(name, entries)
  join_group(holder, name)
end

local function stop_waiting(name, matches)
  local gone = {}
  local value = redis.call('HGET', pending, name)
  if value then
    local kept, before = {}, #gone
    for _, entry in ipairs(cmsgpack.unpack(value)) do
      table.insert(matches(entry) and gone or kept, entry)
    end
    if #gone > before then
      write_pending(name, kept)
    end
  end
  value = redis.call('HGET', poor, name)
  if value then
    local entry, kept, before = cmsgpack.unpack(value), {}, #gone
    for _, one in ipairs(entry[2]) do
      table.insert(matches(one) and gone or kept, one)
    end
    if #kept == 0 then
      redis.call('HDEL', poor, name)
    elseif #gone > before then
      redis.call('HSET', poor, name, cmsgpack.pack({entry[1], kept}))
    end
  end
  leave_groups(name, gone)
end
