-- name: look
-- Read one record, and the clock to compare it with. Lists do not read bodies, only whether there is one.
-- ARGV: with_body
local clock = redis.call('TIME')
local seen = redis.call('HMGET', KEYS[1], 'state', 'scope', 'key', 'attempt', 'token', 'fingerprint', 'recovery_point',
                        'steps', 'status', 'headers', 'created_at', 'lease_expires_at', 'completed_at', 'expires_at',
                        'accepted', 'milestone', 'request_line', 'traceparent')
if not seen[1] then
    return false
end
if seen[1] ~= 'processing' then
    seen[12] = false
end
local body = false
if ARGV[1] == '1' then
    body = redis.call('HGET', KEYS[1], 'body')
elseif redis.call('HEXISTS', KEYS[1], 'body') == 1 then
    body = ''
end
seen[19] = body
seen[20] = clock[1] * 1000000 + clock[2]
return seen
