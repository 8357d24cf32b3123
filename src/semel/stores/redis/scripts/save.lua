-- name: save
-- Store how far the operation has come, in place of what was there before, or of itself, and of nothing else:
-- a copy of this that was held up on its way must not set back one that has gone on.
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
redis.call('HSET', KEYS[1], 'steps', ARGV[4])
if ARGV[5] == '' then
    redis.call('HDEL', KEYS[1], 'recovery_point')
else
    redis.call('HSET', KEYS[1], 'recovery_point', ARGV[5])
end
return 1
