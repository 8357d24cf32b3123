-- name: due
-- Read some of the records that a service should check now, the longest overdue first.
-- ARGV: offset, count. Answers names and times in turn.
local clock = redis.call('TIME')
return redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', clock[1] * 1000000 + clock[2], 'WITHSCORES',
                  'LIMIT', ARGV[1], ARGV[2])
