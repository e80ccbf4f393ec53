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

-- Content lives in time slices, so that ageing costs nothing: a slice is dropped whole. A record says when it ends.
local function slices(family, ttl)
  local width = math.max(1, math.floor(ttl / SLICES))
  local current = math.floor(now / width)
  local names = {}
  for age = 0, SLICES + 1 do
    names[age + 1] = prefix .. family .. ':' .. (current - age)
  end
  return names, width
end
local content_slices, content_width = slices('content', content_ttl)
local offload_slices, offload_width = slices('offload', offload_ttl)

local function alive(record)
  return struct.unpack('>d', string.sub(record, 2, 9)) > now
end

local function put(slice, width, ttl, names, records)
  local room = math.floor(max_content / SLICES) - redis.call('HLEN', slice)
  if room < #names then
    capped_content = capped_content + #names - math.max(0, room)
  end
  local last = math.min(#names, math.max(0, room))
  for first = 1, last, CHUNK do
    local arguments = {}
    for i = first, math.min(first + CHUNK - 1, last) do
      arguments[#arguments + 1] = names[i]
      arguments[#arguments + 1] = records[i]
    end
    redis.call('HSET', slice, unpack(arguments))
  end
  if last > 0 then
    redis.call('PEXPIRE', slice, ttl + 2 * width)
  end
end

local function many(key, names)
  local values = {}
  for first = 1, #names, CHUNK do
    local chunk = {}
    for i = first, math.min(first + CHUNK - 1, #names) do
      chunk[#chunk + 1] = names[i]
    end
    for i, value in ipairs(redis.call('HMGET', key, unpack(chunk))) do
      values[first + i - 1] = value
    end
  end
  return values
end

-- The youngest living record of every name in a family: list of record or false, list of slice ages.
local function find(family_slices, names)
  local found, ages, missing = {}, {}, {}
  for i = 1, #names do
    found[i] = false
    missing[i] = i
  end
  for age, slice in ipairs(family_slices) do
    if #missing == 0 then
      break
    end
    if redis.call('EXISTS', slice) == 1 then
      local wanted = {}
      for j, i in ipairs(missing) do
        wanted[j] = names[i]
      end
      local values, still = many(slice, wanted), {}
      for j, i in ipairs(missing) do
        if values[j] and alive(values[j]) then
          found[i], ages[i] = values[j], age
        elseif values[j] then
          found[i] = false
        else
          still[#still + 1] = i
        end
      end
      missing = still
    end
  end
  return found, ages
end

local function split(packed)
  local names = {}
  for position = 1, #packed, 8 do
    names[#names + 1] = string.sub(packed, position, position + 7)
  end
  return names
end

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
  redis.call('SADD', prefix .. 'group:' .. group_of(waiting[1]), name)
end

-- Records: kind, end (ms, big-endian double), has parent, parent, content, root, teacher.
local function same_place(one, other)
  return string.sub(one, 10, 34) == string.sub(other, 10, 34)
end

local operations = {}

function operations.teach(operation)
  local npu, names, contents = operation[2] == 1, split(operation[3]), operation[5]
  local parent, root, teacher_id, teacher = operation[4], operation[6], operation[7], operation[8]
  local ttl = npu and content_ttl or offload_ttl
  local head = (npu and 'n' or 'o') .. struct.pack('>d', now + ttl)
  local none = string.rep('\0', 8)
  local records = {}
  for i, name in ipairs(names) do
    local content = string.sub(contents, 8 * i - 7, 8 * i)
    if parent == '' then
      records[i] = head .. '0' .. none .. content .. root .. teacher_id
    else
      records[i] = head .. '1' .. parent .. content .. none .. teacher_id
    end
    parent = name
  end
  if npu then
    put(content_slices[1], content_width, ttl, names, records)
  else
    put(offload_slices[1], offload_width, ttl, names, records)
  end
  redis.call('HSETNX', prefix .. 'teachers', teacher_id, teacher)
  local matched, corrected = {}, {}
  if npu and redis.call('EXISTS', poor) == 1 then
    -- What an offload event said of an earlier block of the chain counts too, confirmed or not: all that follows hangs on it.
    local differs = false
    local values, said = many(poor, names), find(offload_slices, names)
    for i = 1, #names do
      local value = values[i]
      differs = differs or (said[i] and not same_place(said[i], records[i]))
      if value then
        local entry = cmsgpack.unpack(value)
        differs = differs or not same_place(entry[1], records[i])
        if differs then
          corrected[#corrected + 1] = {i - 1, entry[2]}
        end
        redis.call('HDEL', poor, names[i])
        leave_groups(names[i], entry[2])
      end
    end
  end
  if redis.call('EXISTS', pending) == 1 then
    local values = many(pending, names)
    for i = 1, #names do
      local value = values[i]
      if value then
        local waiting, entries = {}, cmsgpack.unpack(value)
        write_pending(names[i], {})
        for _, entry in ipairs(entries) do
          if entry[3] > now then
            waiting[#waiting + 1] = {entry[1], entry[2]}
            if not npu then
              mark_poor(names[i], records[i], entry)
            end
          end
        end
        leave_groups(names[i], entries)
        if #waiting > 0 then
          matched[#matched + 1] = {i - 1, waiting}
        end
      end
    end
  end
  if #matched == 0 and #corrected == 0 then
    return false
  end
  local function by_block(one, other)
    return one[1] < other[1]
  end
  table.sort(matched, by_block)
  table.sort(corrected, by_block)
  return {matched, corrected}
end

local function refresh(family_slices, width, ttl, names, found, ages)
  local fresh_names, fresh_records = {}, {}
  for i, record in ipairs(found) do
    if record then
      local ends = struct.unpack('>d', string.sub(record, 2, 9))
      if ages[i] > 1 or ends < now + ttl then
        fresh_names[#fresh_names + 1] = names[i]
        fresh_records[#fresh_records + 1] = string.sub(record, 1, 1)
          .. struct.pack('>d', now + ttl) .. string.sub(record, 10)
      end
    end
  end
  put(family_slices[1], width, ttl, fresh_names, fresh_records)
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
  redis.call('SADD', prefix .. 'group:' .. group_of(holder), name)
end

function operations.prove(operation)
  local names, holder, tier = split(operation[2]), operation[3], operation[4]
  local found, ages = find(content_slices, names)
  refresh(content_slices, content_width, content_ttl, names, found, ages)
  local rest, places = {}, {}
  for i, name in ipairs(names) do
    if not found[i] then
      rest[#rest + 1] = name
      places[#places + 1] = i
    end
  end
  if #rest > 0 then
    local offload, offload_ages = find(offload_slices, rest)
    refresh(offload_slices, offload_width, offload_ttl, rest, offload, offload_ages)
    for j, record in ipairs(offload) do
      if record then
        found[places[j]] = record
        mark_poor(rest[j], record, {holder, tier})
      else
        wait(rest[j], holder, tier)
      end
    end
  end
  local contents = {}
  for i, record in ipairs(found) do
    contents[i] = record and string.sub(record, 10) or ''
  end
  return contents
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

function operations.undo(operation)
  local names, holder, tier, forget_offload = split(operation[2]), operation[3], operation[4], operation[5] == 1
  local busy = redis.call('EXISTS', pending) == 1 or redis.call('EXISTS', poor) == 1
  for _, name in ipairs(names) do
    if busy then
      stop_waiting(name, function(entry)
        return entry[1] == holder and entry[2] == tier
      end)
    end
    if forget_offload then
      for _, slice in ipairs(offload_slices) do
        redis.call('HDEL', slice, name)
      end
    end
  end
  return false
end

function operations.forget(operation)
  local group, holder, tiers = operation[2], operation[3], operation[4]
  local wanted = {}
  for _, tier in ipairs(tiers) do
    wanted[tier] = true
  end
  for _, name in ipairs(redis.call('SMEMBERS', prefix .. 'group:' .. group)) do
    stop_waiting(name, function(entry)
      return wanted[entry[2]] and (holder == '' or entry[1] == holder) and group_of(entry[1]) == group
    end)
  end
  return false
end

local function run(message)
  local results = {}
  for i, operation in ipairs(message[2]) do
    results[i] = operations[operation[1]](operation)
  end
  return results
end

local answers, outbox, ordered = {}, {}, false
for _, message in ipairs(messages) do
  local sequence = message[1]
  if sequence < 0 then
    answers[#answers + 1] = {sequence, run(message)}
  else
    local results = earlier[sequence]
    if sequence > applied then
      results = run(message)
      applied = sequence
    end
    answers[#answers + 1] = {sequence, results or false}
    if results then
      outbox[#outbox + 1] = {sequence, results}
    end
    ordered = true
  end
end
redis.call('HSET', meta, 'epoch', epoch)
if ordered then
  redis.call('HSET', meta, 'applied', applied, 'outbox', cmsgpack.pack(outbox), 'stream', ARGV[5])
end
return cmsgpack.pack({'ok', answers, capped_pending, capped_content})
