-- name: renew
-- Renew a lease, if it is still this attempt's. One that ran out, and was not taken over, is still its own.
-- It is allowed when memory is full, as "complete" is, and in the same way.
-- ARGV: attempt, token, lease. Answers 1, or 0: lost.
local seen = redis.call('HMGET', KEYS[1], 'state', 'attempt', 'token')
if seen[1] ~= 'processing' or seen[2] ~= ARGV[1] or seen[3] ~= ARGV[2] then
    return 0
end
local clock = redis.call('TIME')
redis.call('HDEL', KEYS[1], '')
redis.call('HSET', KEYS[1], 'lease_expires_at', clock[1] * 1000000 + clock[2] + ARGV[3])
return 1
