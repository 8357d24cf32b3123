-- name: release
-- Free the key: nothing happened. Attempt 0 stands for the attempt with this token, whatever its number.
-- After a take-over, and after a saved step, something may have happened; and an accepted operation was promised to
-- be run. Such a record stays without a holder, and the next request may take it at once.
-- ARGV: attempt, token, token_of_none, channel, hint. No channel: no request waits.
-- Answers the result (0: fenced, 1: there was none, 2: it is free, 3: it was given up), and the attempt.
local seen = redis.call('HMGET', KEYS[1], 'state', 'attempt', 'token', 'steps', 'accepted')
if not seen[1] then
    return {1, 0}
end
local is_its = seen[3] == ARGV[2] and (ARGV[1] == '0' or seen[2] == ARGV[1])
if not is_its or (seen[1] ~= 'processing' and seen[1] ~= 'pending') then
    return {0, 0}
end
local attempt = tonumber(seen[2])
local what = 2
if seen[1] == 'processing' and (attempt > 1 or seen[4] or seen[5]) then
    local clock = redis.call('TIME')
    -- Allowed when memory is full, as "complete" is.
    redis.call('HDEL', KEYS[1], '')
    redis.call('HSET', KEYS[1], 'token', ARGV[3], 'lease_expires_at', clock[1] * 1000000 + clock[2])
    what = 3
else
    redis.call('DEL', KEYS[1])
end
if ARGV[4] ~= '' then
    redis.pcall('PUBLISH', ARGV[4], ARGV[5])
end
return {what, attempt}
