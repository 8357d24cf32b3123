-- name: mark
-- Store the progress that the handler reports, for the status URL. Nothing else depends on it.
-- ARGV: attempt, token, milestone. Answers 1, or 0: fenced.
local seen = redis.call('HMGET', KEYS[1], 'state', 'attempt', 'token')
if seen[1] ~= 'processing' or seen[2] ~= ARGV[1] or seen[3] ~= ARGV[2] then
    return 0
end
redis.call('HSET', KEYS[1], 'milestone', ARGV[3])
return 1
