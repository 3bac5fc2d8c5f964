-- The rate that pods keep together, one hash for each upstream or named route of it. Pods lease shares of the rate; what
-- is not leased fills a bucket here, by this server's clock, from which tokens are given singly.
--
-- Fields: tokens (in the bucket), ts (up to when it is filled, ms; ahead of now after a loss), sum (of all shares), need
-- (tokens a second that all pods asked for), and for each pod with a share p:POD = "share need until", until in ms. What is
-- missing or unreadable reads as 0, the tokens as a full bucket.
--
-- ARGV: pod, rate (tokens a second), burst, need (tokens a second), tokens wanted at once, tokens given back, 1 if the
-- pod's own bucket is empty, for how long the lease is (ms), the share that it goes by, the channel, its id there, how often
-- others may be called on (ms). A need of 0 gives the lease back. Where a pod finds less than its part, because others
-- lease more than they would get now, they are called on to ask anew: "rate ID" is published.
-- Answers {share, tokens, 1 if there is not enough for all, the share to be had by asking again: once the others have
-- asked anew, or for a greater need, ms until a token is here}, shares as texts.
local key, pod = KEYS[1], ARGV[1]
local rate, burst, need, want = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local left, is_new, term = tonumber(ARGV[6]), ARGV[7] == '1', tonumber(ARGV[8])
local held, channel, id, pause = tonumber(ARGV[9]), ARGV[10], ARGV[11], tonumber(ARGV[12])
local time = redis.call('TIME')
local now = time[1] * 1000 + time[2] / 1000

-- What may be leased; the rest is there for pods that have just begun.
local MOST = 0.98
-- A pod leases at most so many times what it needs, so that calls need not come evenly.
local ROOM = 3
-- Up to so many leases are added up anew each time; of more, sums are kept, and a few are looked at each time.
local FEW = 64

local function number(text)
  local found = tonumber(text or '') or 0
  if found ~= found or math.abs(found) > 1e15 then return 0 end
  return found
end

-- What no pod can have written counts as ended.
local function read(entry)
  local share, need, till = string.match(entry or '', '^(%S+) (%S+) (%S+)$')
  share, need, till = number(share), number(need), number(till)
  if share < 0 or share > 1 or need < 0 or till > now + 180000 then till = 0 end
  return share, need, till
end

local found = redis.call('HMGET', key, 'tokens', 'ts', 'sum', 'need', 'p:' .. pod, 'called')
local tokens, ts = tonumber(found[1] or ''), number(found[2])
local sum, all_need = number(found[3]), number(found[4])
local old_share, old_need = read(found[5])

-- Where nothing is known and yet a pod goes by a share, it was lost: what there was to save up may be spent, and the
-- others go by theirs until they have come back and asked. Until then nothing comes in.
local blind = 2.5 * pause
if ts <= 0 and held > 0 then tokens, ts = 0, now + blind end
-- This clock went back.
if ts > now + blind then ts = now end

-- The bucket fills at the rate that was not leased until now.
local free = math.max(0, math.min(1, 1 - sum))
tokens = math.min(burst * free, math.max(0, tokens or burst) + math.max(0, now - ts) / 1000 * rate * free)
tokens = math.min(burst, tokens + left)

-- Leases that have ended count no more, nor does this pod's own.
local function forget(field, share, its_need)
  redis.call('HDEL', key, field)
  sum, all_need = sum - share, all_need - its_need
end
if found[5] then
  forget('p:' .. pod, old_share, old_need)
end
if redis.call('HLEN', key) <= FEW + 5 then
  sum, all_need = 0, 0
  local all = redis.call('HGETALL', key)
  for at = 1, #all, 2 do
    if string.sub(all[at], 1, 2) == 'p:' then
      local share, its_need, till = read(all[at + 1])
      if till > now then
        sum, all_need = sum + share, all_need + its_need
      else
        redis.call('HDEL', key, all[at])
      end
    end
  end
else
  local some = redis.call('HRANDFIELD', key, 4, 'WITHVALUES')
  for at = 1, #some, 2 do
    if string.sub(some[at], 1, 2) == 'p:' then
      local share, its_need, till = read(some[at + 1])
      if till <= now then forget(some[at], share, its_need) end
    end
  end
end
sum, all_need = math.max(0, sum), math.max(0, all_need)

-- The pod's part by its need. Where a lease would bring hardly a token, it leases nothing and takes single ones.
local share, fair = 0, 0
if need > 0 then
  fair = math.min(MOST * need / (all_need + need), ROOM * need / rate)
end
if math.min(need, fair * rate) * term / 1000 >= 2 then
  all_need = all_need + need
  share = math.max(0, math.min(fair, MOST - sum))
  -- What was leased and is not known here any more, the others may still go by as well.
  if held > 0 and (not found[5] or ts > now) then share = math.min(share, held) end
  sum = sum + share
  redis.call('HSET', key, 'p:' .. pod, string.format('%.9g %.9g %.0f', share, need, now + term))
end

local given = want
if is_new then given = given + math.floor(burst * share) end
given = math.min(given, math.floor(tokens))
tokens = tokens - given
redis.call('HSET', key, 'tokens', tokens, 'ts', string.format('%.3f', math.max(ts, now)), 'sum', sum, 'need', all_need)
redis.call('PEXPIRE', key, math.ceil(math.max(60000, 2 * term, burst / rate * 1000)))

if share < 0.8 * fair and math.abs(now - number(found[6])) >= pause then
  redis.call('HSET', key, 'called', string.format('%.0f', now))
  redis.call('PUBLISH', channel, 'rate ' .. id)
end

local wait = math.max(0, 1 - tokens) / (rate * math.max(1 - sum, 0.001)) * 1000
local is_scarce = all_need > 0.9 * rate or given < want
local prospect = math.max(fair, share + math.max(0, MOST - sum))
return { string.format('%.9g', share), given, is_scarce and 1 or 0, string.format('%.9g', prospect),
  math.ceil(math.min(wait, 60000)) }
