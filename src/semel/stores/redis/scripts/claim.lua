-- name: claim
-- Take each key that is free; otherwise return what is there.
-- A script is atomic: of any number of claims, one finds nothing. One that finds a record writes nothing, so that a
-- replay costs neither replication nor a line of the append-only file. Records in progress have no TTL: a key that still
-- runs is never freed by the clock.
-- Claims under the same terms go in one call, and read the clock once; in a Cluster each has its own call. One
-- that is refused (memory is full) refuses no other: its error is its outcome.
-- A key with its own time needs no tombstone, if that is before now by this clock: a late retry is refused by its age.
-- on_crash and after_retention are stored if they are not "rerun" and "delete".
-- ARGV: lease, retention, on_crash, after_retention, is_accepted, channel; and for each key in turn:
--       scope, key, token, fingerprint, request_line, traceparent [, made_at, request, request_body]; an empty text stands
--       for none.
-- Answers for each key 1, or what was found, or an error.
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
local width = (#ARGV - 6) / #KEYS
local created_at, expires_at, lease_expires_at
local function add(record, name, value)
    record[#record + 1] = name
    record[#record + 1] = value
end
local outcomes = {}
for place = 1, #KEYS do
    local seen = redis.pcall('HMGET', KEYS[place], 'state', 'attempt', 'token', 'fingerprint', 'status', 'headers',
                             'body', 'lease_expires_at', 'expires_at', 'steps', 'accepted', 'traceparent')
    if seen[1] then
        seen[8] = (seen[1] == 'processing' and tonumber(seen[8]) > now) and 0 or 1
        seen[9] = seen[9] - now
        outcomes[place] = seen
    elseif seen.err then
        outcomes[place] = seen
    else
        if not created_at then
            created_at = string.format('%.0f', now)
            expires_at = string.format('%.0f', now + ARGV[2])
            lease_expires_at = string.format('%.0f', now + ARGV[1])
        end
        local at = 6 + (place - 1) * width
        local record = {'scope', ARGV[at + 1], 'key', ARGV[at + 2], 'state', 'processing', 'attempt', '1',
                        'token', ARGV[at + 3], 'fingerprint', ARGV[at + 4], 'created_at', created_at,
                        'expires_at', expires_at, 'lease_expires_at', lease_expires_at}
        if ARGV[5] == '1' then
            record[6] = 'pending'
            record[17] = 'accepted'
            record[18] = '1'
        end
        if ARGV[3] ~= 'rerun' then
            add(record, 'on_crash', ARGV[3])
        end
        if ARGV[at + 5] ~= '' then
            add(record, 'request_line', ARGV[at + 5])
        end
        if ARGV[at + 6] ~= '' then
            add(record, 'traceparent', ARGV[at + 6])
        end
        local made_at = width > 6 and ARGV[at + 7] or ''
        local needs_no_tombstone = ARGV[4] == 'strip' and made_at ~= '' and tonumber(made_at) <= now
        if ARGV[4] ~= 'delete' and not needs_no_tombstone then
            add(record, 'after_retention', ARGV[4])
        end
        if width > 6 and ARGV[at + 8] ~= '' then
            add(record, 'request', ARGV[at + 8])
            add(record, 'request_body', ARGV[at + 9])
        end
        local done = redis.pcall('HSET', KEYS[place], unpack(record))
        if type(done) ~= 'table' then
            outcomes[place] = 1
            if ARGV[5] == '1' then
                -- Tell listening workers. If publishing is not allowed, they will find the record later.
                redis.pcall('PUBLISH', ARGV[6], 'accepted')
            end
        elseif string.find(done.err, 'READONLY') then
            -- Another server is the master now, for all of these.
            return done
        else
            outcomes[place] = done
        end
    end
end
return outcomes
