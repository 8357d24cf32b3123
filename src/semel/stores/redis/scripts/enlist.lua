-- name: enlist
-- Note when a service should check some records again: when their leases or their retention will be over.
-- It is only a hint: the records themselves may be on other servers of a Cluster. Nothing is decided by it.
-- ARGV: names and delays in turn. Answers the time that the delays were added to.
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
for each = 1, #ARGV, 2 do
    redis.call('ZADD', KEYS[1], now + ARGV[each + 1], ARGV[each])
end
return now
