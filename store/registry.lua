-- Workers that serve requests: who is there, until when, by this server's clock, and which of them
-- keeps a stored response. And what the operator wishes of the fleet.
--
-- Keys behind the fleet's prefix: workers HASH name -> record, worker_leases ZSET name -> deadline,
-- wish HASH generation, record; worker_orders HASH worker -> order, and orders_changed HASH
-- generation, which counts changes of them; polls HASH engine -> deadline, router; responses HASH
-- response -> worker, response_ends ZSET response -> deadline. None has a time to live: a policy of volatile-lru must not evict them.

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

local function count_order(keys)
  return redis.call('HINCRBY', keys[1] .. 'orders_changed', 'generation', 1)
end

-- How often orders changed, and all of them: names and orders in turn.
local function orders(keys)
  local generation = redis.call('HGET', keys[1] .. 'orders_changed', 'generation') or '0'
  return { generation, redis.call('HGETALL', keys[1] .. 'worker_orders') }
end

local function give_order(keys, args)
  redis.call('HSET', keys[1] .. 'worker_orders', args[1], args[2])
  return count_order(keys)
end

local function withdraw_order(keys, args)
  redis.call('HDEL', keys[1] .. 'worker_orders', args[1])
  return count_order(keys)
end

-- Puts back what this server has forgotten: names and orders in turn, an empty one is none.
-- 0 if orders of another generation came between.
local function restore_orders(keys, args)
  if (redis.call('HGET', keys[1] .. 'orders_changed', 'generation') or '0') ~= args[1] then
    return 0
  end
  for i = 3, #args, 2 do
    if args[i + 1] == '' then
      redis.call('HDEL', keys[1] .. 'worker_orders', args[i])
    else
      redis.call('HSET', keys[1] .. 'worker_orders', args[i], args[i + 1])
    end
  end
  redis.call('HSET', keys[1] .. 'orders_changed', 'generation', args[2])
  return 1
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

-- Which workers keep responses, for so long: names and workers in turn. What is over goes, and the
-- oldest of too many.
local function note_responses(keys, args)
  local workers, ends = keys[1] .. 'responses', keys[1] .. 'response_ends'
  local now, ttl_s, most = now_s(), tonumber(args[1]), tonumber(args[2])
  for i = 3, #args, 2 do
    redis.call('HSET', workers, args[i], args[i + 1])
    redis.call('ZADD', ends, string.format('%.6f', now + ttl_s), args[i])
  end
  local over = redis.call('ZRANGEBYSCORE', ends, '-inf', string.format('%.6f', now), 'LIMIT', 0, #args + 100)
  for _, response in ipairs(over) do
    redis.call('ZREM', ends, response)
    redis.call('HDEL', workers, response)
  end
  local oldest = redis.call('ZPOPMIN', ends, math.max(0, redis.call('HLEN', workers) - most))
  for i = 1, #oldest, 2 do
    redis.call('HDEL', workers, oldest[i])
  end
  return 1
end

local function response_worker(keys, args)
  local ends = redis.call('ZMSCORE', keys[1] .. 'response_ends', args[1])[1]
  if not ends or tonumber(ends) <= now_s() then
    return ''
  end
  return redis.call('HGET', keys[1] .. 'responses', args[1]) or ''
end

redis.register_function { function_name = LIBRARY .. '_note_responses', callback = note_responses }
redis.register_function { function_name = LIBRARY .. '_response_worker', callback = response_worker, flags = { 'no-writes' } }
redis.register_function { function_name = LIBRARY .. '_claim_poll', callback = claim_poll, flags = { 'allow-oom' } }
redis.register_function { function_name = LIBRARY .. '_announce', callback = announce, flags = { 'allow-oom' } }
redis.register_function { function_name = LIBRARY .. '_withdraw', callback = withdraw, flags = { 'allow-oom' } }
redis.register_function { function_name = LIBRARY .. '_workers', callback = workers, flags = { 'no-writes' } }
redis.register_function { function_name = LIBRARY .. '_wish', callback = wish, flags = { 'no-writes' } }
redis.register_function { function_name = LIBRARY .. '_change_wish', callback = change_wish, flags = { 'allow-oom' } }
redis.register_function { function_name = LIBRARY .. '_orders', callback = orders, flags = { 'no-writes' } }
redis.register_function { function_name = LIBRARY .. '_give_order', callback = give_order, flags = { 'allow-oom' } }
redis.register_function { function_name = LIBRARY .. '_withdraw_order', callback = withdraw_order, flags = { 'allow-oom' } }
redis.register_function { function_name = LIBRARY .. '_restore_orders', callback = restore_orders, flags = { 'allow-oom' } }
