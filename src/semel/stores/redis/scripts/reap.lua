-- name: reap
-- Clear one record that is past retention: none in progress, none parked, no tombstone that has to stay.
-- One without an end fails first, without a holder: its worker, if it still lives, must not believe that its answer was
-- kept. Most records never come here: Redis has deleted them by their TTL.
-- ARGV: token_of_none, status, headers, body
-- Answers the result (0: nothing, 1: deleted, 2: stripped, 3: failed), and the attempt.
local seen = redis.call('HMGET', KEYS[1], 'state', 'attempt', 'lease_expires_at', 'expires_at', 'after_retention')
if not seen[1] or seen[1] == 'unknown' then
    return {0, 0}
end
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
if tonumber(seen[4]) > now or (seen[1] == 'processing' and tonumber(seen[3]) > now) then
    return {0, 0}
end
local attempt = tonumber(seen[2])
if seen[1] ~= 'complete' and seen[1] ~= 'failed' then
    redis.call('HSET', KEYS[1], 'state', 'failed', 'token', ARGV[1], 'status', ARGV[2], 'headers', ARGV[3],
               'body', ARGV[4], 'completed_at', now)
    redis.call('HDEL', KEYS[1], 'lease_expires_at', 'request', 'request_body')
    if not seen[5] then
        redis.call('PEXPIREAT', KEYS[1], math.ceil((now + 60000000) / 1000))
    end
    return {3, attempt}
end
if seen[5] == 'keep' then
    return {0, 0}
end
if seen[5] == 'strip' then
    redis.call('HSET', KEYS[1], 'headers', '[]', 'after_retention', 'keep')
    redis.call('HDEL', KEYS[1], 'body', 'steps', 'recovery_point')
    return {2, attempt}
end
redis.call('DEL', KEYS[1])
return {1, attempt}
