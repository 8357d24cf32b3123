-- name: read_request
-- Read the request that was stored with a record, if it is still the one that was seen.
-- ARGV: attempt, token
local seen = redis.call('HMGET', KEYS[1], 'attempt', 'token', 'request', 'request_body')
if seen[1] ~= ARGV[1] or seen[2] ~= ARGV[2] or not seen[3] then
    return false
end
return {seen[3], seen[4]}
