-- A pod says that it lives; how many do. KEYS[1] is a sorted set of pods by the time (of Redis, in ms) at which
-- they are taken to be gone. ARGV: the pod, for how long it is taken to live (ms).
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZADD', KEYS[1], now + ARGV[2], ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
redis.call('PEXPIRE', KEYS[1], 10 * ARGV[2])
return redis.call('ZCARD', KEYS[1])
