-- name: judge
-- Read the part of a record that the services need, and the clock to compare it with.
local clock = redis.call('TIME')
local seen = redis.call('HMGET', KEYS[1], 'state', 'scope', 'key', 'attempt', 'token', 'lease_expires_at', 'created_at',
                        'expires_at', 'after_retention', 'on_crash', 'steps', 'tries', 'accepted')
if not seen[1] then
    return false
end
if seen[1] ~= 'processing' then
    seen[6] = false
end
seen[9] = seen[9] or 'delete'
seen[10] = seen[10] or 'rerun'
seen[14] = redis.call('HEXISTS', KEYS[1], 'request')
seen[15] = clock[1] * 1000000 + clock[2]
return seen
