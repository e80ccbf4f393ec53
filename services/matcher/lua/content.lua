-- Content of blocks in time slices, and packed lists of names.
-- Content lives in time slices, so that ageing costs nothing: a slice is dropped whole. A record says when it ends.
local function slices(family, ttl)
  local width = math.max(1, math.floor(ttl / SLICES))
  local current = math.floor(now / width)
  local names = {}
  for age = 0, SLICES + 1 do
    names[age + 1] = prefix .. family .. ':' .. (current - age)
  end
  -- The last leader's clock may have been a little ahead.
  table.insert(names, 2, prefix .. family .. ':' .. (current + 1))
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
    -- Only for a space without a leader: expire.lua unlinks a slice long before, without stopping the server.
    redis.call('PEXPIRE', slice, 4 * ttl)
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

-- Names of blocks: the engine hash, behind the worker's id where names stay in a worker's own domain.
local function split(packed, domain)
  local names = {}
  for position = 1, #packed, 8 do
    local hash = string.sub(packed, position, position + 7)
    names[#names + 1] = domain == '' and hash or domain .. hash
  end
  return names
end

-- Who teaches, and when they were last of use: their names are pruned with their contents (expire.lua).
local function used(teacher_id)
  redis.call('ZADD', prefix .. 'teacher_times', now, teacher_id)
end

local function refresh(family_slices, width, ttl, names, found, ages)
  local fresh_names, fresh_records, teachers = {}, {}, {}
  for i, record in ipairs(found) do
    if record then
      local ends = struct.unpack('>d', string.sub(record, 2, 9))
      if ages[i] > 1 or ends < now + ttl then
        fresh_names[#fresh_names + 1] = names[i]
        teachers[string.sub(record, 35, 42)] = true
        fresh_records[#fresh_records + 1] = string.sub(record, 1, 1)
          .. struct.pack('>d', now + ttl) .. string.sub(record, 10)
      end
    end
  end
  for teacher_id in pairs(teachers) do
    used(teacher_id)
  end
  put(family_slices[1], width, ttl, fresh_names, fresh_records)
end
