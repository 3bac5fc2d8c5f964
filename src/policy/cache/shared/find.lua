-- What the pods keep of an answer. KEYS, both of one slot: the answer, the mark of its resource. ARGV: the most bytes.
-- Nothing where nothing is kept, or more than that. Else the answer, how long it is still kept (ms), and of the mark for
-- how long it was set and how long it still is.
local size = redis.call('STRLEN', KEYS[1])
if size == 0 or size > tonumber(ARGV[1]) then
  return {}
end
return {
  redis.call('GET', KEYS[1]),
  redis.call('PTTL', KEYS[1]),
  redis.call('GET', KEYS[2]) or '',
  redis.call('PTTL', KEYS[2]),
}
