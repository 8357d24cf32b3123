-- name: unpark
-- Let a parked operation go on: an operator has said what its effect did. It has no holder, and may be taken at once.
-- It counts as an attempt, the operator's; the tries without its client and its retention start again from zero.
-- ARGV: attempt, token, token_of_none, steps, recovery_point; an empty text stands for none.
-- Answers the new attempt, or 0: fenced.
local seen = redis.call('HMGET', KEYS[1], 'state', 'attempt', 'token', 'created_at', 'expires_at')
if seen[1] ~= 'unknown' or seen[2] ~= ARGV[1] or seen[3] ~= ARGV[2] then
    return 0
end
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
local attempt = seen[2] + 1
redis.call('HSET', KEYS[1], 'state', 'processing', 'attempt', attempt, 'token', ARGV[3], 'lease_expires_at', now,
           'expires_at', now + seen[5] - seen[4])
redis.call('HDEL', KEYS[1], 'tries', 'steps', 'recovery_point')
if ARGV[4] ~= '' then
    redis.call('HSET', KEYS[1], 'steps', ARGV[4])
end
if ARGV[5] ~= '' then
    redis.call('HSET', KEYS[1], 'recovery_point', ARGV[5])
end
return attempt
