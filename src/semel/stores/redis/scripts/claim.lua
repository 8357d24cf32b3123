-- name: claim
-- Take the key if nobody has it; say what is there otherwise.
-- A script is one step: of any number of claims, one finds nothing. One that finds something writes nothing, so that a
-- replay costs neither replication nor a line of the append-only file. No record in flight has a TTL: a key that still
-- runs is never freed by the clock.
-- A key that tells when it was made needs no tombstone, if that was before now by this clock: it is refused by its age.
-- ARGV: scope, key, token, fingerprint, lease, retention, on_crash, after_retention, channel, is_accepted,
--       made_at (or an empty text) [, request, request_body]
local seen = redis.call('HMGET', KEYS[1], 'state', 'attempt', 'token', 'fingerprint', 'status', 'headers', 'body',
                        'lease_expires_at', 'expires_at', 'steps', 'accepted')
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
if seen[1] then
    seen[8] = (not seen[8] or tonumber(seen[8]) <= now) and 1 or 0
    seen[9] = seen[9] - now
    return seen
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
if ARGV[12] then
    record[#record + 1] = 'request'
    record[#record + 1] = ARGV[12]
    record[#record + 1] = 'request_body'
    record[#record + 1] = ARGV[13]
end
redis.call('HSET', KEYS[1], unpack(record))
if ARGV[10] == '1' then
    -- A worker may listen. Without leave to publish it will find the record all the same.
    redis.pcall('PUBLISH', ARGV[9], 'accepted')
end
return 1
