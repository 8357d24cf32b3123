-- name: complete
-- Store how an operation ended. Only the attempt that holds the key may, and it proves it by its token.
-- From now on Redis may delete the record by itself when its retention is over; but not within the next minute, in
-- which this may be said again because the reply was lost. What is to leave a tombstone is the reaper's to strip.
-- The request is needed no more; the steps stay, for people to look at.
-- ARGV: attempt, token, state, status, headers, channel, hint [, body]. No channel: nobody waits. No body: a tombstone.
-- Answers 0: fenced; 1: it had ended so before; 2: it has now; or how long it has to be kept before it is stripped.
local seen = redis.call('HMGET', KEYS[1], 'state', 'attempt', 'token', 'expires_at', 'after_retention')
if seen[2] ~= ARGV[1] or seen[3] ~= ARGV[2] then
    return 0
end
if seen[1] == 'complete' or seen[1] == 'failed' then
    return 1
end
if seen[1] ~= 'processing' then
    return 0
end
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
if ARGV[8] then
    redis.call('HSET', KEYS[1], 'state', ARGV[3], 'status', ARGV[4], 'headers', ARGV[5], 'completed_at', now,
               'body', ARGV[8])
else
    redis.call('HSET', KEYS[1], 'state', ARGV[3], 'status', ARGV[4], 'headers', ARGV[5], 'completed_at', now)
end
redis.call('HDEL', KEYS[1], 'lease_expires_at', 'request', 'request_body')
if ARGV[6] ~= '' then
    redis.pcall('PUBLISH', ARGV[6], ARGV[7])
end
if seen[5] ~= 'delete' then
    return {seen[4] - now}
end
redis.call('PEXPIREAT', KEYS[1], math.ceil(math.max(seen[4], now + 60000000) / 1000))
return 2
