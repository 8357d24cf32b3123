-- name: take_over
-- Take the key over after its lease ran out, or its record expired, if it is still the one that was seen;
-- without a client (is_abandoned), also begin a pending one.
-- An expired record becomes a new operation. Any other stays the same operation: it keeps its age, its fingerprint,
-- its steps and its request. Either way it is in progress now, and has no TTL.
-- Not under its own token: by number and token, the new one could not be told from the old one.
-- An unknown one never expires: an operator has to resolve it.
-- ARGV: lease, retention, on_crash, after_retention, is_accepted, channel, seen_attempt, seen_token, is_abandoned,
--       scope, key, token, fingerprint, request_line, traceparent [, made_at, request, request_body]; as for claim.
local seen = redis.call('HMGET', KEYS[1], 'state', 'attempt', 'token', 'lease_expires_at', 'expires_at')
if not seen[1] or seen[2] ~= ARGV[7] or seen[3] ~= ARGV[8] then
    return false
end
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
local is_expired = tonumber(seen[5]) <= now
local is_abandoned = ARGV[9] == '1'
local is_begun = seen[1] == 'pending' and is_abandoned
local may_be_taken = is_expired and seen[1] ~= 'unknown'
if seen[1] == 'processing' then
    may_be_taken = tonumber(seen[4]) <= now
end
if (is_expired and (is_abandoned or seen[3] == ARGV[12])) or not (is_begun or may_be_taken) then
    return false
end
if not is_expired then
    local attempt = tonumber(seen[2])
    if not is_begun then
        attempt = attempt + 1
    end
    redis.call('HSET', KEYS[1], 'state', 'processing', 'attempt', attempt, 'token', ARGV[12],
               'lease_expires_at', now + ARGV[1])
    if ARGV[15] ~= '' then
        redis.call('HSET', KEYS[1], 'traceparent', ARGV[15])
    end
    if is_abandoned then
        redis.call('HINCRBY', KEYS[1], 'tries', 1)
    end
    redis.call('PERSIST', KEYS[1])
    return {attempt, is_begun and 'claimed' or 'taken over'}
end
local record = {'scope', ARGV[10], 'key', ARGV[11], 'state', 'processing', 'attempt', 1, 'token', ARGV[12],
                'fingerprint', ARGV[13], 'created_at', now, 'expires_at', now + ARGV[2]}
local function add(name, value)
    record[#record + 1] = name
    record[#record + 1] = value
end
if ARGV[5] == '1' then
    record[6] = 'pending'
    add('accepted', 1)
else
    add('lease_expires_at', now + ARGV[1])
end
if ARGV[3] ~= 'rerun' then
    add('on_crash', ARGV[3])
end
local made_at = ARGV[16] or ''
if ARGV[4] ~= 'delete' and not (ARGV[4] == 'strip' and made_at ~= '' and tonumber(made_at) <= now) then
    add('after_retention', ARGV[4])
end
if ARGV[14] ~= '' then
    add('request_line', ARGV[14])
end
if ARGV[15] ~= '' then
    add('traceparent', ARGV[15])
end
if ARGV[17] and ARGV[17] ~= '' then
    add('request', ARGV[17])
    add('request_body', ARGV[18])
end
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], unpack(record))
if ARGV[5] == '1' then
    redis.pcall('PUBLISH', ARGV[6], 'accepted')
    return {1, 'accepted'}
end
return {1, 'taken over'}
