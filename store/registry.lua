-- Workers that serve requests: who is there, until when, by this server's clock, and which of them
-- keeps a stored response. And what the operator wishes of the fleet.
--
-- Keys behind the fleet's prefix: workers HASH name -> record, worker_leases ZSET name -> deadline,
-- wish HASH generation, record; worker_orders HASH worker -> order, and orders_changed HASH
-- generation, which counts changes of them; polls HASH engine -> deadline, router. Of each tenant
-- with stored responses, responses:TENANT HASH response -> worker, response_ends:TENANT ZSET
-- response -> deadline; of all of them response_tenants ZSET tenant -> how many it has, below zero,
-- response_firsts ZSET tenant -> its first deadline, response_count HASH all -> their number. None has a time to live: a policy of volatile-lru must not evict them.

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

-- A tenant's responses, of which it had so many, have changed.
local function settle(keys, tenant, had)
  local workers, ends = keys[1] .. 'responses:' .. tenant, keys[1] .. 'response_ends:' .. tenant
  local first = redis.call('ZRANGEBYSCORE', ends, '-inf', '+inf', 'WITHSCORES', 'LIMIT', 0, 1)[2]
  if first then
    redis.call('ZADD', keys[1] .. 'response_firsts', first, tenant)
    redis.call('ZADD', keys[1] .. 'response_tenants', -redis.call('HLEN', workers), tenant)
  else
    redis.call('DEL', workers)
    redis.call('ZREM', keys[1] .. 'response_firsts', tenant)
    redis.call('ZREM', keys[1] .. 'response_tenants', tenant)
  end
  redis.call('HINCRBY', keys[1] .. 'response_count', 'all', redis.call('HLEN', workers) - had)
end

-- The oldest of who has most go, as many at once as it has more than the next, until there are so many.
local function forget_oldest(keys, most)
  local over = tonumber(redis.call('HGET', keys[1] .. 'response_count', 'all') or 0) - most
  while over > 0 do
    local largest = redis.call('ZRANGEBYSCORE', keys[1] .. 'response_tenants', '-inf', '+inf', 'WITHSCORES', 'LIMIT', 0, 2)
    local tenant = largest[1]
    if not tenant then -- a server that lost some keys only
      redis.call('DEL', keys[1] .. 'response_count')
      return
    end
    local had = -tonumber(largest[2])
    local more = had + tonumber(largest[4] or 0)
    local ends, workers = keys[1] .. 'response_ends:' .. tenant, keys[1] .. 'responses:' .. tenant
    local oldest = redis.call('ZPOPMIN', ends, math.min(over, math.max(1, more)))
    for i = 1, #oldest, 2 do
      redis.call('HDEL', workers, oldest[i])
    end
    settle(keys, tenant, had)
    over = tonumber(redis.call('HGET', keys[1] .. 'response_count', 'all')) - most
  end
end

-- Which workers keep responses, for so long: tenants, names and workers in turn. What is over goes,
-- also of others, and what is too many.
local function note_responses(keys, args)
  local now, ttl_s = now_s(), tonumber(args[1])
  local had = {}
  local function look_at(tenant)
    had[tenant] = had[tenant] or redis.call('HLEN', keys[1] .. 'responses:' .. tenant)
  end
  for i = 3, #args, 3 do
    look_at(args[i])
    redis.call('HSET', keys[1] .. 'responses:' .. args[i], args[i + 1], args[i + 2])
    redis.call('ZADD', keys[1] .. 'response_ends:' .. args[i], string.format('%.6f', now + ttl_s), args[i + 1])
  end
  local until_now = string.format('%.6f', now)
  for _, tenant in ipairs(redis.call('ZRANGEBYSCORE', keys[1] .. 'response_firsts', '-inf', until_now, 'LIMIT', 0, 16)) do
    look_at(tenant)
  end
  for tenant, count in pairs(had) do
    local ends = keys[1] .. 'response_ends:' .. tenant
    for _, response in ipairs(redis.call('ZRANGEBYSCORE', ends, '-inf', until_now, 'LIMIT', 0, #args + 100)) do
      redis.call('ZREM', ends, response)
      redis.call('HDEL', keys[1] .. 'responses:' .. tenant, response)
    end
    settle(keys, tenant, count)
  end
  forget_oldest(keys, tonumber(args[2]))
  return 1
end

local function response_worker(keys, args)
  local ends = redis.call('ZMSCORE', keys[1] .. 'response_ends:' .. args[1], args[2])[1]
  if not ends or tonumber(ends) <= now_s() then
    return ''
  end
  return redis.call('HGET', keys[1] .. 'responses:' .. args[1], args[2]) or ''
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
