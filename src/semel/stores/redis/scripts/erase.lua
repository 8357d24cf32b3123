-- name: erase
-- Make a tombstone of one record, if it is of this owner and has ended: a retry is refused, and runs nothing. One that has
-- not ended stays as it is. Its TTL stays, too.
-- ARGV: owner, is_preview
-- Answers scope, key and state, and whether there was something to erase; or nothing, if it is not of this owner.
local seen = redis.call('HMGET', KEYS[1], 'scope', 'key', 'state', 'headers')
local owner = ARGV[1]
if not seen[1] or (seen[1] ~= owner and string.sub(seen[1], 1, #owner + 1) ~= owner .. '\t') then
    return false
end
local has_data = 0
if seen[3] == 'complete' or seen[3] == 'failed' then
    if seen[4] ~= '[]' then
        has_data = 1
    end
    for _, name in ipairs({'body', 'steps', 'recovery_point', 'request', 'request_body', 'milestone', 'request_line',
                           'traceparent'}) do
        if redis.call('HEXISTS', KEYS[1], name) == 1 then
            has_data = 1
            if ARGV[2] == '0' then
                redis.call('HDEL', KEYS[1], name)
            end
        end
    end
    if has_data == 1 and ARGV[2] == '0' then
        redis.call('HSET', KEYS[1], 'headers', '[]')
    end
end
return {seen[1], seen[2], seen[3], has_data}
