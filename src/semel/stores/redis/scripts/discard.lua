-- name: discard
-- Delete a record that has not ended, by an operator's order. Its worker is fenced.
-- ARGV: attempt, token. Answers 1, or 0: it has ended, or another attempt has it.
local seen = redis.call('HMGET', KEYS[1], 'state', 'attempt', 'token')
if seen[2] ~= ARGV[1] or seen[3] ~= ARGV[2] or seen[1] == 'complete' or seen[1] == 'failed' then
    return 0
end
redis.call('DEL', KEYS[1])
return 1
