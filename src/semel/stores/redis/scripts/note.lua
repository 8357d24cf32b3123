-- name: note
-- Add lines to the audit trail of a key: the time, and what happened as JSON.
-- The trail expires a while after its last line, if no reaper clears it sooner.
-- ARGV: how many milliseconds to keep it, and the lines
local clock = redis.call('TIME')
for each = 2, #ARGV do
    redis.call('RPUSH', KEYS[1], string.format('%.0f ', clock[1] * 1000000 + clock[2]) .. ARGV[each])
end
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return 1
