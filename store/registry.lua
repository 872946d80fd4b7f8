-- Workers that serve requests: who is there, until when, by this server's clock. And what the
-- operator wishes of the fleet.
--
-- Keys behind the fleet's prefix: workers HASH name -> record, worker_leases ZSET name -> deadline,
-- wish HASH generation, record; polls HASH engine -> deadline, router. None has a time to live: a policy of volatile-lru must not evict them.

local function now_s()
  local time = redis.call('TIME')
  return tonumber(time[1]) + tonumber(time[2]) / 1e6
end

local function withdraw(keys, args)
  redis.call('ZREM', keys[1] .. 'worker_leases', args[1])
  return redis.call('HDEL', keys[1] .. 'workers', args[1])
end

local function announce(keys, args)
  local worker, record, ttl_s = args[1], args[2], tonumber(args[3])
  local leases = keys[1] .. 'worker_leases'
  local now = now_s()
  for _, gone in ipairs(redis.call('ZRANGEBYSCORE', leases, '-inf', string.format('%.6f', now))) do
    withdraw(keys, { gone })
  end
  redis.call('ZADD', leases, string.format('%.6f', now + ttl_s), worker)
  redis.call('HSET', keys[1] .. 'workers', worker, record)
  return 1
end

local function workers(keys)
  local records = {}
  local now = string.format('(%.6f', now_s())
  for _, worker in ipairs(redis.call('ZRANGEBYSCORE', keys[1] .. 'worker_leases', now, '+inf')) do
    records[#records + 1] = redis.call('HGET', keys[1] .. 'workers', worker) or ''
  end
  return records
end

local function wish(keys)
  return redis.call('HMGET', keys[1] .. 'wish', 'generation', 'record')
end

-- Replaces the wish of that generation: 0 if another one came between.
local function change_wish(keys, args)
  local key = keys[1] .. 'wish'
  if (redis.call('HGET', key, 'generation') or '0') ~= args[1] then
    return 0
  end
  redis.call('HSET', key, 'record', args[2])
  return redis.call('HINCRBY', key, 'generation', 1)
end

-- Lets one router poll an engine, as long as it comes back in time. Who may now.
local function claim_poll(keys, args)
  local key, engine, router, now = keys[1] .. 'polls', args[1], args[2], now_s()
  local known = redis.call('HGETALL', key)
  for i = 1, #known, 2 do
    if tonumber(string.match(known[i + 1], '^[%d.]+')) < now then
      redis.call('HDEL', key, known[i])
    end
  end
  local holder = string.match(redis.call('HGET', key, engine) or '', ' (.*)$') or router
  if holder == router then
    redis.call('HSET', key, engine, string.format('%.6f %s', now + tonumber(args[3]), router))
  end
  return holder
end

redis.register_function { function_name = LIBRARY .. '_claim_poll', callback = claim_poll, flags = { 'allow-oom' } }
redis.register_function { function_name = LIBRARY .. '_announce', callback = announce, flags = { 'allow-oom' } }
redis.register_function { function_name = LIBRARY .. '_withdraw', callback = withdraw, flags = { 'allow-oom' } }
redis.register_function { function_name = LIBRARY .. '_workers', callback = workers, flags = { 'no-writes' } }
redis.register_function { function_name = LIBRARY .. '_wish', callback = wish, flags = { 'no-writes' } }
redis.register_function { function_name = LIBRARY .. '_change_wish', callback = change_wish, flags = { 'allow-oom' } }
