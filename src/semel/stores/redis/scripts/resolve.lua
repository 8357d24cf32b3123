-- name: resolve
-- End a parked operation with an answer: an operator says that it took effect. It is kept for a whole retention from
-- now on.
-- ARGV: attempt, token, token_of_none, status, headers [, body]. No body: a tombstone.
-- Answers 0: fenced; 2: done; 3 and more: done, and it has to be kept for so long (less 3) before it is stripped.
local seen = redis.call('HMGET', KEYS[1], 'state', 'attempt', 'token', 'created_at', 'expires_at', 'after_retention')
if seen[1] ~= 'unknown' or seen[2] ~= ARGV[1] or seen[3] ~= ARGV[2] then
    return 0
end
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
local expires_at = now + seen[5] - seen[4]
redis.call('HSET', KEYS[1], 'state', 'complete', 'token', ARGV[3], 'status', ARGV[4], 'headers', ARGV[5],
           'completed_at', now, 'expires_at', expires_at)
if ARGV[6] then
    redis.call('HSET', KEYS[1], 'body', ARGV[6])
end
redis.call('HDEL', KEYS[1], 'request', 'request_body')
if seen[6] then
    return 3 + math.max(expires_at - now, 0)
end
redis.call('PEXPIREAT', KEYS[1], math.ceil(math.max(expires_at, now + 60000000) / 1000))
return 2
