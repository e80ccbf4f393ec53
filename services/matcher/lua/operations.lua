-- The operations of services/matcher/state.py, and the call itself: messages in order, each applied once.
local operations = {}

function operations.teach(operation)
  local npu, names, contents = operation[2] == 1, split(operation[3], operation[9]), operation[5]
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
    parent = string.sub(name, -8)
  end
  if npu then
    put(content_slices[1], content_width, ttl, names, records)
  else
    put(offload_slices[1], offload_width, ttl, names, records)
  end
  redis.call('HSETNX', prefix .. 'teachers', teacher_id, teacher)
  used(teacher_id)
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

function operations.prove(operation)
  local names, holder, tier = split(operation[2], operation[5]), operation[3], operation[4]
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

function operations.undo(operation)
  local names, holder, tier, forgetful = split(operation[2], operation[6]), operation[3], operation[4], operation[5]
  local busy = redis.call('EXISTS', pending) == 1 or redis.call('EXISTS', poor) == 1
  for _, name in ipairs(names) do
    if busy then
      stop_waiting(name, function(entry)
        return entry[1] == holder and entry[2] == tier
      end)
    end
  end
  if forgetful ~= '' then
    for _, slice in ipairs(offload_slices) do
      if redis.call('EXISTS', slice) == 1 then
        for i, record in ipairs(many(slice, names)) do
          if record and string.sub(record, 35, 42) == forgetful then
            redis.call('HDEL', slice, names[i])
          end
        end
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

-- A publisher's generation decides before anything of its message is looked at.
local function admit(group, generation, lowest)
  if group == '' then
    return 'admitted'
  end
  local current = tonumber(redis.call('HGET', prefix .. 'generations', group) or '-1')
  if generation < current or generation < lowest then
    return 'retired'
  end
  if generation == current then
    return 'admitted'
  end
  redis.call('HSET', prefix .. 'generations', group, generation)
  if current < 0 then
    return 'admitted'
  end
  operations.forget({'forget', group, '', {'n', 'c', 'd'}})
  return 'restarted'
end

local function run(message)
  local results, verdict = {}, admit(message[3], message[4], message[5])
  if verdict ~= 'retired' then
    for i, operation in ipairs(message[2]) do
      results[i] = operations[operation[1]](operation)
    end
  end
  return {verdict, results}
end

local answers, outbox, last = {}, {}, nil
for _, message in ipairs(messages) do
  local sequence = message[1]
  if sequence < 0 then
    answers[#answers + 1] = {sequence, run(message)}
  else
    local answer = earlier[sequence]
    if sequence > applied then
      answer = run(message)
      applied = sequence
    end
    answers[#answers + 1] = {sequence, answer or false}
    if answer then
      outbox[#outbox + 1] = {sequence, answer}
    end
    last = sequence
  end
end
redis.call('HSET', meta, 'epoch', epoch, 'stream', stream)
if last then
  -- What lies behind this call was not asked for again yet: a new leader may take smaller batches.
  for _, entry in ipairs(before) do
    if entry[1] > last then
      outbox[#outbox + 1] = entry
    end
  end
  redis.call('HSET', meta, 'applied', applied, 'outbox', cmsgpack.pack(outbox))
elseif not same_stream then
  redis.call('HDEL', meta, 'applied', 'outbox')
end
return cmsgpack.pack({'ok', answers, capped_pending, capped_content})
