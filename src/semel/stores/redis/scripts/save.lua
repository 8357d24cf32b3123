-- name: save
-- Store the steps. They replace what was there before, or themselves, and nothing else:
-- a delayed copy of this must not set back later progress.
-- It is allowed when memory is full, as "complete" is, and in the same way: an effect may have happened already.
-- ARGV: attempt, token, before, steps, recovery_point; an empty text stands for none. Answers 1, or 0: fenced.
local seen = redis.call('HMGET', KEYS[1], 'state', 'attempt', 'token', 'steps')
local steps = seen[4] or ''
if seen[1] ~= 'processing' or seen[2] ~= ARGV[1] or seen[3] ~= ARGV[2] or (steps ~= ARGV[3] and steps ~= ARGV[4]) then
    return 0
end
if ARGV[4] == '' then
    redis.call('HDEL', KEYS[1], 'steps', 'recovery_point')
    return 1
end
redis.call('HDEL', KEYS[1], '')
redis.call('HSET', KEYS[1], 'steps', ARGV[4])
if ARGV[5] == '' then
    redis.call('HDEL', KEYS[1], 'recovery_point')
else
    redis.call('HSET', KEYS[1], 'recovery_point', ARGV[5])
end
return 1
