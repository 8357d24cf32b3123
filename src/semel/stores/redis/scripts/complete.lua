-- name: complete
-- Store how operations ended. Only the attempt that holds a key may do this: its token is compared.
-- From now on Redis may delete a record by itself when its retention is over; but not within the next minute, in which
-- this may be sent again because the reply was lost. The reaper strips records that leave a tombstone.
-- The request is deleted; the steps stay, for operators. The lease stays, too: it has no meaning any more,
-- and deleting it would be one more command.
-- It is allowed when memory is full: what has begun must be able to end, and there are only so many of those. Redis
-- refuses only the first write of a script, and never one that makes nothing larger: so the first deletes nothing.
-- ARGV: channel; and for each key in turn: attempt, token, state, status, headers, hint [, body].
--       No hint: no caller waits. No body: a tombstone.
-- Answers for each key 0: fenced; 1: it had ended so before; 2: it has now; 3 and more: it has now, and has to be kept
-- for so long (less 3) before it is stripped; or an error.
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
local completed_at = string.format('%.0f', now)
local width = (#ARGV - 1) / #KEYS
local outcomes = {}
for place = 1, #KEYS do
    local name = KEYS[place]
    local at = 1 + (place - 1) * width
    local seen = redis.pcall('HMGET', name, 'state', 'attempt', 'token', 'expires_at', 'after_retention', 'request')
    if seen.err then
        outcomes[place] = seen
    elseif seen[2] ~= ARGV[at + 1] or seen[3] ~= ARGV[at + 2] then
        outcomes[place] = 0
    elseif seen[1] == 'complete' or seen[1] == 'failed' then
        outcomes[place] = 1
    elseif seen[1] ~= 'processing' then
        outcomes[place] = 0
    else
        local done
        redis.pcall('HDEL', name, '')
        if width > 6 then
            done = redis.pcall('HSET', name, 'state', ARGV[at + 3], 'status', ARGV[at + 4], 'headers', ARGV[at + 5],
                               'completed_at', completed_at, 'body', ARGV[at + 7])
        else
            done = redis.pcall('HSET', name, 'state', ARGV[at + 3], 'status', ARGV[at + 4], 'headers', ARGV[at + 5],
                               'completed_at', completed_at)
        end
        if type(done) == 'table' then
            if string.find(done.err, 'READONLY') then
                return done
            end
            outcomes[place] = done
        else
            if seen[6] then
                redis.call('HDEL', name, 'request', 'request_body')
            end
            if ARGV[at + 6] ~= '' then
                redis.pcall('PUBLISH', ARGV[1], ARGV[at + 6])
            end
            if seen[5] then
                outcomes[place] = 3 + math.max(seen[4] - now, 0)
            else
                redis.call('PEXPIREAT', name, math.ceil(math.max(seen[4], now + 60000000) / 1000))
                outcomes[place] = 2
            end
        end
    end
end
return outcomes
