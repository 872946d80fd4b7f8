-- Workers that serve requests: who is there, until when, by this server's clock.
--
-- Keys behind the fleet's prefix: workers HASH name -> record, worker_leases ZSET name -> deadline.
-- Neither has a time to live: a policy of volatile-lru must not evict them.

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

redis.register_function { function_name = LIBRARY .. '_announce', callback = announce, flags = { 'allow-oom' } }
redis.register_function { function_name = LIBRARY .. '_withdraw', callback = withdraw, flags = { 'allow-oom' } }
redis.register_function { function_name = LIBRARY .. '_workers', callback = workers, flags = { 'no-writes' } }
