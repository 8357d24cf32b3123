-- name: park
-- Stop an operation until an operator resolves it. It has no lease then, and no TTL.
-- Its worker may send this twice. Others may only after the lease is over, and one of them gets 2.
-- It is allowed when memory is full, as "complete" is: what is parked does not run again.
-- ARGV: attempt, token, if_silent. Answers 0: fenced; 1: it was parked before; 2: it is now.
local seen = redis.call('HMGET', KEYS[1], 'state', 'attempt', 'token', 'lease_expires_at')
if seen[2] ~= ARGV[1] or seen[3] ~= ARGV[2] then
    return 0
end
local if_silent = ARGV[3] == '1'
if seen[1] == 'unknown' and not if_silent then
    return 1
end
if seen[1] ~= 'processing' and seen[1] ~= 'pending' then
    return 0
end
if if_silent and seen[4] then
    local clock = redis.call('TIME')
    if tonumber(seen[4]) > clock[1] * 1000000 + clock[2] then
        return 0
    end
end
redis.call('HDEL', KEYS[1], 'lease_expires_at', '')
redis.call('HSET', KEYS[1], 'state', 'unknown')
return 2
