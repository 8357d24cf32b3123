-- name: sweep
-- Free the key of a dead worker, if its lease is still over. The record stays, for the next worker to take over.
-- ARGV: attempt, token, token_of_none. Answers 1, or 0: fenced.
local seen = redis.call('HMGET', KEYS[1], 'state', 'attempt', 'token', 'lease_expires_at')
if seen[1] ~= 'processing' or seen[2] ~= ARGV[1] or seen[3] ~= ARGV[2] then
    return 0
end
local clock = redis.call('TIME')
if tonumber(seen[4]) > clock[1] * 1000000 + clock[2] then
    return 0
end
redis.call('HSET', KEYS[1], 'token', ARGV[3])
return 1
