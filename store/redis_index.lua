-- The prefix index on the server: every change is one atomic call, with its event in the stream.
--
-- Keys, all behind the fleet's prefix, which is the one declared key of each call:
--   meta      HASH    generation, events (sequence number), slots (ever handed out), epoch (last)
--   nodes     HASH    node -> slot of its current life
--   records   HASH    node -> what it says of itself
--   owners    HASH    slot -> identity: "<epoch> <node>"
--   leases    ZSET    slot -> deadline, seconds of this server's clock
--   terms     HASH    slot -> term of the last change; see as_member
--   s:<head>  HASH    8-byte field of a block -> bitmap of slots; one key a segment
--   heads     SET     heads of the segments there are
--   events    STREAM  ids "<generation>-<sequence>" without holes: a hole tells a reader of a loss
--   free      ZSET    swept slots, lowest first
--   dirty     SET     slots of ended lives whose bits are still set; not given out before swept
--   sweeping, sweep, todo: the sweep in progress (its slots, its cursors, segments to visit)
-- Only segments have a time to live, so that a policy of volatile-lru evicts nothing else.

local FIELD_BYTES = 8
local SEGMENT_BLOCKS = 128
local SEGMENT_TTL_S = 30 * 86400
local MAX_SLOTS = 4096
local SMALL_HASH = 512
local MANY_FIELDS = 64
local SWEEP_FIELDS = 256

local function now_s()
  local time = redis.call('TIME')
  return tonumber(time[1]) + tonumber(time[2]) / 1e6
end

local function whole(number)
  return string.format('%.0f', number)
end

local function unpack_fields(packed)
  local fields = {}
  for start = 1, #packed, FIELD_BYTES do
    fields[#fields + 1] = packed:sub(start, start + FIELD_BYTES - 1)
  end
  return fields
end

-- Lives and leases.

local function add_event(prefix, max_events, kind, slot, identity, fields)
  local meta = prefix .. 'meta'
  local stream = prefix .. 'events'
  local function add()
    local generation = redis.call('HGET', meta, 'generation')
    local id = generation .. '-' .. whole(redis.call('HINCRBY', meta, 'events', 1))
    return redis.pcall('XADD', stream, 'MAXLEN', '~', max_events, id,
      'kind', kind, 'slot', slot, 'identity', identity, 'fields', fields)
  end
  redis.call('HSETNX', meta, 'generation', whole(now_s() * 1000))
  if add().err then -- somebody else wrote there: begin anew, readers see a gap
    redis.call('DEL', stream)
    redis.call('HSET', meta, 'generation', whole(now_s() * 1000), 'events', 0)
    add()
  end
end

local function node_of(identity)
  return identity and identity:match('^%d+ (.*)$')
end

local function end_life(prefix, max_events, slot)
  local identity = redis.call('HGET', prefix .. 'owners', slot)
  redis.call('ZREM', prefix .. 'leases', slot)
  if not identity then return end
  redis.call('HDEL', prefix .. 'owners', slot)
  redis.call('HDEL', prefix .. 'terms', slot)
  if tonumber(slot) then redis.call('SADD', prefix .. 'dirty', slot) end
  local node = node_of(identity)
  if node and redis.call('HGET', prefix .. 'nodes', node) == tostring(slot) then
    redis.call('HDEL', prefix .. 'nodes', node)
    redis.call('HDEL', prefix .. 'records', node)
  end
  add_event(prefix, max_events, 'leave', slot, identity, '')
end

local function end_lapsed(prefix, max_events, now)
  for _, slot in ipairs(redis.call('ZRANGEBYSCORE', prefix .. 'leases', '-inf', now)) do
    end_life(prefix, max_events, slot)
  end
end

-- Every writing call of a member begins with its slot, its identity, the length of the stream and
-- its term. A caller that got no answer begins a new term: what is still under way of an earlier
-- one must not be done after a later change (a block published again behind its withdrawal).
local function as_member(change)
  return function(keys, args)
    local prefix, slot, identity, max_events, term = keys[1], args[1], args[2], args[3], args[4]
    local now = now_s()
    end_lapsed(prefix, max_events, string.format('%.6f', now))
    if redis.call('HGET', prefix .. 'owners', slot) ~= identity then
      return redis.error_reply('FENCED slot ' .. slot .. ' is not held by "' .. identity .. '"')
    end
    local last = redis.call('HGET', prefix .. 'terms', slot)
    if last and tonumber(term) < tonumber(last) then
      return redis.error_reply('LATE a change of term ' .. term .. ' came after term ' .. last)
    end
    if term ~= last then redis.call('HSET', prefix .. 'terms', slot, term) end
    return change(prefix, slot, identity, max_events, { unpack(args, 5) }, now)
  end
end

local function extend_lease(prefix, slot, lease_s, now)
  redis.call('ZADD', prefix .. 'leases', string.format('%.6f', now + lease_s), slot)
end

local function to_sweep(prefix)
  return redis.call('SCARD', prefix .. 'dirty') + redis.call('SCARD', prefix .. 'sweeping')
end

local function take_slot(prefix)
  local free = redis.call('ZPOPMIN', prefix .. 'free')[1]
  if free then return free end
  local slots = tonumber(redis.call('HGET', prefix .. 'meta', 'slots') or 0)
  if slots >= MAX_SLOTS then return nil end
  redis.call('HSET', prefix .. 'meta', 'slots', slots + 1)
  return tostring(slots)
end

local function join(keys, args)
  local prefix, node, record, lease_s, max_events = keys[1], args[1], args[2], args[3], args[4]
  local now = now_s()
  end_lapsed(prefix, max_events, string.format('%.6f', now))
  local old = redis.call('HGET', prefix .. 'nodes', node)
  if old then end_life(prefix, max_events, old) end
  local slot = take_slot(prefix)
  if not slot then
    return redis.error_reply('NOSLOT all ' .. MAX_SLOTS .. ' slots are taken or not swept yet')
  end
  -- By the clock, so that an epoch from before a flush of this server never comes again.
  local last = tonumber(redis.call('HGET', prefix .. 'meta', 'epoch') or 0)
  local epoch = whole(math.max(last + 1, math.floor(now * 1000)))
  local identity = epoch .. ' ' .. node
  redis.call('HSET', prefix .. 'meta', 'epoch', epoch)
  redis.call('HSET', prefix .. 'owners', slot, identity)
  redis.call('HSET', prefix .. 'nodes', node, slot)
  redis.call('HSET', prefix .. 'records', node, record)
  extend_lease(prefix, slot, lease_s, now)
  add_event(prefix, max_events, 'join', slot, identity, '')
  return { slot, epoch, to_sweep(prefix) }
end

local function renew(prefix, slot, identity, _, args, now)
  extend_lease(prefix, slot, args[2], now)
  redis.call('HSET', prefix .. 'records', node_of(identity), args[1])
  return to_sweep(prefix)
end

local function leave(prefix, slot, _, max_events)
  end_life(prefix, max_events, slot)
  return 1
end

-- Blocks. Segments come as pairs: the head, then the fields packed into one string.

-- Bitmap of each packed field, false without one. A small hash is a list that every single
-- look-up walks: for many fields, one walk over all of it takes half the time.
local function bitmaps(key, packed)
  if #packed < MANY_FIELDS * FIELD_BYTES or redis.call('HLEN', key) > SMALL_HASH then
    return redis.call('HMGET', key, unpack(unpack_fields(packed)))
  end
  local all, known, found = redis.call('HGETALL', key), {}, {}
  for i = 1, #all, 2 do known[all[i]] = all[i + 1] end
  for i = 1, #packed / FIELD_BYTES do
    found[i] = known[packed:sub(FIELD_BYTES * (i - 1) + 1, FIELD_BYTES * i)] or false
  end
  return found
end

local function change_segment(prefix, head, packed, change)
  local key = prefix .. 's:' .. head
  local old, fields = bitmaps(key, packed), unpack_fields(packed)
  local new, set, cleared, changed = {}, {}, {}, {}
  for i, field in ipairs(fields) do
    local before = old[i] or ''
    if new[before] == nil then new[before] = change(before) end
    local bitmap = new[before]
    if bitmap then
      changed[#changed + 1] = field
      if bitmap == '' then
        cleared[#cleared + 1] = field
      else
        set[#set + 1] = field
        set[#set + 1] = bitmap
      end
    end
  end
  if #set > 0 then redis.call('HSET', key, unpack(set)) end
  if #cleared > 0 then redis.call('HDEL', key, unpack(cleared)) end
  return key, changed
end

local function change_segments(kind, change, after)
  return as_member(function(prefix, slot, identity, max_events, args)
    local all = {}
    for i = 1, #args - 1, 2 do
      local key, changed = change_segment(prefix, args[i], args[i + 1],
        function(bitmap) return change(bitmap, slot) end)
      after(prefix, args[i], key)
      all[#all + 1] = table.concat(changed)
    end
    local fields = table.concat(all)
    if fields ~= '' then add_event(prefix, max_events, kind, slot, identity, fields) end
    return #fields / FIELD_BYTES
  end)
end

local publish = change_segments('publish', function(bitmap, slot)
  return not has_bit(bitmap, slot) and with_bit(bitmap, slot)
end, function(prefix, head, key)
  redis.call('SADD', prefix .. 'heads', head)
  redis.call('EXPIRE', key, SEGMENT_TTL_S)
end)

local function forget_if_empty(prefix, head, key)
  if redis.call('EXISTS', key) == 0 then redis.call('SREM', prefix .. 'heads', head) end
end

local withdraw = change_segments('withdraw', function(bitmap, slot)
  return has_bit(bitmap, slot) and without_bit(bitmap, slot)
end, forget_if_empty)

-- Questions.

-- Slots that hold the first block, and how many leading blocks each holds; dead ones too.
local function lengths(prefix, packed, heads)
  local slots, reach, alive, last, length = {}, {}, nil, nil, 0
  local function narrow(bitmap)
    local before = alive or bitmap
    alive = band(before, bitmap)
    for _, slot in ipairs(slots_of(before)) do
      if not has_bit(alive, slot) then
        slots[#slots + 1] = slot
        reach[#reach + 1] = length
      end
    end
  end
  for s, head in ipairs(heads) do
    local start = (s - 1) * SEGMENT_BLOCKS * FIELD_BYTES
    local part = packed:sub(start + 1, start + SEGMENT_BLOCKS * FIELD_BYTES)
    for _, bitmap in ipairs(bitmaps(prefix .. 's:' .. head, part)) do
      if bitmap ~= last then -- strings are interned: holders seldom change along a chain
        last = bitmap
        narrow(bitmap or '')
        if not alive:find('[^%z]') then return slots, reach end
      end
      length = length + 1
    end
  end
  narrow('')
  return slots, reach
end

local function match(keys, args)
  local prefix = keys[1]
  local slots, reach = lengths(prefix, args[1], { unpack(args, 2) })
  if #slots == 0 then return {} end
  local now = now_s()
  local identities = redis.call('HMGET', prefix .. 'owners', unpack(slots))
  local deadlines = redis.call('ZMSCORE', prefix .. 'leases', unpack(slots))
  local answer = {}
  for i, length in ipairs(reach) do
    if node_of(identities[i]) and deadlines[i] and tonumber(deadlines[i]) > now then
      answer[#answer + 1] = identities[i]
      answer[#answer + 1] = length
    end
  end
  return answer
end

local function live_slots(prefix)
  return redis.call('ZRANGEBYSCORE', prefix .. 'leases', string.format('(%.6f', now_s()), '+inf')
end

local function copies(keys, args)
  local prefix = keys[1]
  local live, counts, answer = {}, {}, {}
  for _, slot in ipairs(live_slots(prefix)) do live[slot] = true end
  for i = 1, #args - 1, 2 do
    for _, bitmap in ipairs(bitmaps(prefix .. 's:' .. args[i], args[i + 1])) do
      bitmap = bitmap or ''
      if not counts[bitmap] then
        counts[bitmap] = 0
        for _, slot in ipairs(slots_of(bitmap)) do
          if live[tostring(slot)] then counts[bitmap] = counts[bitmap] + 1 end
        end
      end
      answer[#answer + 1] = counts[bitmap]
    end
  end
  return answer
end

local function members(keys)
  local prefix = keys[1]
  local position = redis.call('HMGET', prefix .. 'meta', 'generation', 'events')
  local answer = { position[1] or '0', position[2] or '0' }
  for _, slot in ipairs(live_slots(prefix)) do
    local identity = redis.call('HGET', prefix .. 'owners', slot)
    local node = node_of(identity)
    local record = node and redis.call('HGET', prefix .. 'records', node)
    if record then
      answer[#answer + 1] = slot
      answer[#answer + 1] = identity
      answer[#answer + 1] = record
    end
  end
  return answer
end

-- The sweep: clears the bits of ended lives in bounded steps, then their slots are free again.
-- No bit of theirs is ever set anew, so one visit to each segment that was there is enough.

local function clear_some(prefix, head, slots, cursor)
  local key = prefix .. 's:' .. head
  local reply = redis.call('HSCAN', key, cursor, 'COUNT', SWEEP_FIELDS)
  for i = 1, #reply[2] - 1, 2 do
    local bitmap, before = reply[2][i + 1], reply[2][i + 1]
    for _, slot in ipairs(slots) do
      if has_bit(bitmap, slot) then bitmap = without_bit(bitmap, slot) end
    end
    if bitmap == '' then
      redis.call('HDEL', key, reply[2][i])
    elseif bitmap ~= before then
      redis.call('HSET', key, reply[2][i], bitmap)
    end
  end
  forget_if_empty(prefix, head, key)
  return reply[1]
end

local function sweep(keys)
  local prefix = keys[1]
  local state, todo, sweeping = prefix .. 'sweep', prefix .. 'todo', prefix .. 'sweeping'
  if redis.call('EXISTS', sweeping) == 0 then
    if redis.call('EXISTS', prefix .. 'dirty') == 0 then return 0 end
    redis.call('RENAME', prefix .. 'dirty', sweeping)
    redis.call('DEL', todo)
    redis.call('HSET', state, 'heads', '0', 'fields', '0')
  end
  local slots = redis.call('SMEMBERS', sweeping)
  local cursors = redis.call('HMGET', state, 'heads', 'fields')
  local head = redis.call('LINDEX', todo, 0)
  if head then
    local next_field = clear_some(prefix, head, slots, cursors[2])
    redis.call('HSET', state, 'fields', next_field)
    if next_field == '0' then redis.call('LPOP', todo) end
  elseif cursors[1] == 'end' then
    for _, slot in ipairs(slots) do redis.call('ZADD', prefix .. 'free', slot, slot) end
    redis.call('DEL', sweeping, state)
  else
    local reply = redis.call('SSCAN', prefix .. 'heads', cursors[1], 'COUNT', 32)
    if #reply[2] > 0 then redis.call('RPUSH', todo, unpack(reply[2])) end
    redis.call('HSET', state, 'heads', reply[1] == '0' and 'end' or reply[1])
  end
  return to_sweep(prefix)
end

local function register(name, callback, ...)
  redis.register_function {
    function_name = LIBRARY .. '_' .. name, callback = callback, flags = { ... }
  }
end

register('join', join)
register('renew', as_member(renew), 'allow-oom')
register('leave', as_member(leave), 'allow-oom')
register('publish', publish)
register('withdraw', withdraw, 'allow-oom')
register('sweep', sweep, 'allow-oom')
register('match', match, 'no-writes')
register('copies', copies, 'no-writes')
register('members', members, 'no-writes')
