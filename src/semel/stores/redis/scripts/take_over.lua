-- name: take_over
-- Take the key from a worker whose lease ran out, or from a record that expired, if it is still the one that was seen;
-- without a client (is_abandoned), also begin one that is pending.
-- A record that expired starts anew. One that did not stays the same operation: it keeps its age, its fingerprint,
-- its steps and its request. Either way it is in flight now, and has no TTL.
-- What is unknown never expires: an operator has to say what it did.
-- ARGV: scope, key, token, fingerprint, lease, retention, on_crash, after_retention, channel, is_accepted,
--       made_at (or an empty text), seen_attempt, seen_token, is_abandoned [, request, request_body]
local seen = redis.call('HMGET', KEYS[1], 'state', 'attempt', 'token', 'lease_expires_at', 'expires_at')
if not seen[1] or seen[2] ~= ARGV[12] or seen[3] ~= ARGV[13] then
    return false
end
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
local is_expired = tonumber(seen[5]) <= now
local is_abandoned = ARGV[14] == '1'
local is_begun = seen[1] == 'pending' and is_abandoned
local may_be_taken = is_expired and seen[1] ~= 'unknown'
if seen[1] == 'processing' then
    may_be_taken = tonumber(seen[4]) <= now
end
if (is_abandoned and is_expired) or not (is_begun or may_be_taken) then
    return false
end
if not is_expired then
    local attempt = tonumber(seen[2])
    if not is_begun then
        attempt = attempt + 1
    end
    redis.call('HSET', KEYS[1], 'state', 'processing', 'attempt', attempt, 'token', ARGV[3],
               'lease_expires_at', now + ARGV[5])
    if is_abandoned then
        redis.call('HINCRBY', KEYS[1], 'tries', 1)
    end
    redis.call('PERSIST', KEYS[1])
    return {attempt, is_begun and 'claimed' or 'taken over'}
end
local after_retention = ARGV[8]
if after_retention == 'strip' and ARGV[11] ~= '' and tonumber(ARGV[11]) <= now then
    after_retention = 'delete'
end
local record = {'scope', ARGV[1], 'key', ARGV[2], 'state', 'processing', 'attempt', 1, 'token', ARGV[3],
                'fingerprint', ARGV[4], 'created_at', now, 'expires_at', now + ARGV[6],
                'on_crash', ARGV[7], 'after_retention', after_retention}
if ARGV[10] == '1' then
    record[6] = 'pending'
    record[#record + 1] = 'accepted'
    record[#record + 1] = 1
else
    record[#record + 1] = 'lease_expires_at'
    record[#record + 1] = now + ARGV[5]
end
if ARGV[15] then
    record[#record + 1] = 'request'
    record[#record + 1] = ARGV[15]
    record[#record + 1] = 'request_body'
    record[#record + 1] = ARGV[16]
end
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], unpack(record))
if ARGV[10] == '1' then
    redis.pcall('PUBLISH', ARGV[9], 'accepted')
    return {1, 'accepted'}
end
return {1, 'taken over'}
