-- The breaker that pods share, one hash for each upstream or named route of it. All that is decided for the fleet is
-- decided here, by this server's clock.
--
-- Fields: state (open, half_open, closed), since (when it came about, ms), open_until_ts (ms), reopens (failed
-- returns), failure_count, last_failure_ts (ms); while half-open lease (a pod), lease_until_ts (ms), succeeded
-- (probes); and for each pod that has opened its own breaker, until the fleet's opens, e:POD = "ms:failures", where ms
-- is until when that counts. What is missing or unreadable reads as 0 or as no state.
--
-- A state of no time is no pod's, and one that lies in the future is from before this server's clock went back, or
-- another server's, as is a wait of more than a week: it reads as none.
--
-- ARGV: op, pod, channel, id, then what the op takes. Answers {state, since, remaining ms, reopens}, or to a pod
-- that may probe {'granted', since, succeeded}.
local key, op, pod, channel, id = KEYS[1], ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local function number(text)
  local found = tonumber(text or '') or 0
  if found ~= found or math.abs(found) > 1e15 then return 0 end
  return found
end

local found = redis.call('HMGET', key, 'state', 'since', 'open_until_ts', 'reopens', 'lease', 'lease_until_ts')
local state, since, open_until, reopens = found[1] or '', number(found[2]), number(found[3]), number(found[4])
local lease, lease_until = found[5], number(found[6])
if since <= 0 or since > now + 60000 or open_until > now + 7 * 86400000 then
  state, since, open_until, reopens = '', 0, 0, 0
end
if lease_until > now + 60000 then
  lease_until = 0
end

local function remaining()
  if state == 'open' then return math.max(0, open_until - now) end
  if state == 'half_open' then return math.max(0, lease_until - now) end
  return 0
end

local function told()
  return { state, since, remaining(), reopens }
end

-- Five minutes, or a minute past the wait, the later.
local function keep()
  redis.call('PEXPIREAT', key, math.max(now + 300000, open_until + 60000))
end

-- A state begins. Its time is later than any before, so that a pod can tell which of two words is the newer.
local function begin(new)
  state, since = new, math.max(now, since + 1)
  redis.call('HSET', key, 'state', state, 'since', since, 'open_until_ts', open_until, 'reopens', reopens)
  keep()
end

local function publish()
  redis.call('PUBLISH', channel, table.concat({ pod, state, since, remaining(), reopens, id }, ' '))
end

local function open(wait, failed_returns)
  open_until, reopens = now + wait, failed_returns
  redis.call('HDEL', key, 'lease', 'lease_until_ts')
  begin('open')
  publish()
end

if op == 'read' then
  return told()
end

if op == 'recant' then
  redis.call('HDEL', key, 'e:' .. pod)
  return told()
end

-- A pod has opened its own breaker. ARGV: quorum, failures, its wait (ms), for how long that counts (ms).
if op == 'trip' then
  if remaining() > 0 then
    return told()
  end
  redis.call('HSET', key, 'e:' .. pod, (now + ARGV[8]) .. ':' .. ARGV[6])
  local pods, failures, evidence = 0, 0, {}
  local all = redis.call('HGETALL', key)
  for at = 1, #all, 2 do
    if string.sub(all[at], 1, 2) == 'e:' then
      local till, count = string.match(all[at + 1], '^(%d+):(%d+)$')
      if number(till) > now then
        pods, failures = pods + 1, failures + number(count)
        evidence[#evidence + 1] = all[at]
      else
        redis.call('HDEL', key, all[at])
      end
    end
  end
  redis.call('HSET', key, 'failure_count', failures, 'last_failure_ts', now)
  keep()
  if pods >= number(ARGV[5]) then
    redis.call('HDEL', key, 'succeeded', unpack(evidence))
    open(number(ARGV[7]), 0)
  end
  return told()
end

-- A pod has a call to make and the wait is over for it. Where there is no state it was lost: what the pod finds out is
-- its own business then, as at the beginning. ARGV: for how long it may take (ms).
if op == 'probe' then
  local is_free = (state == 'open' and open_until <= now)
    or (state == 'half_open' and (lease_until <= now or lease == pod))
  if not is_free then
    return told()
  end
  lease_until = now + ARGV[5]
  redis.call('HSET', key, 'lease', pod, 'lease_until_ts', lease_until)
  begin('half_open')
  publish()
  return { 'granted', since, number(redis.call('HGET', key, 'succeeded')) }
end

-- The rest is for the pod that probes, about the leave that began at ARGV[5]. One that was away too long finds that it
-- no longer has it, and so does what it said of an earlier one and what comes late.
if state ~= 'half_open' or lease ~= pod or since ~= number(ARGV[5]) then
  return told()
end

-- It goes on. ARGV: for how long it may take (ms).
if op == 'prolong' then
  lease_until = now + ARGV[6]
  redis.call('HSET', key, 'lease_until_ts', lease_until)
  keep()
end

-- It knows. ARGV: the wait (ms), failed returns; or closed.
if op == 'settle' then
  redis.call('HDEL', key, 'succeeded')
  if ARGV[6] ~= 'closed' then
    redis.call('HSET', key, 'last_failure_ts', now)
    open(number(ARGV[6]), number(ARGV[7]))
  else
    open_until, reopens = 0, 0
    redis.call('HDEL', key, 'lease', 'lease_until_ts', 'failure_count')
    begin('closed')
    publish()
  end
end

-- It knows nothing yet. ARGV: the wait (ms), probes that have succeeded.
if op == 'hand_back' then
  redis.call('HSET', key, 'succeeded', number(ARGV[7]))
  open(number(ARGV[6]), reopens)
end

return told()
