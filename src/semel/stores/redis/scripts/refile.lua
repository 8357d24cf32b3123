-- name: refile
-- Remove records from the list of those to check, or move them; but only those that were not enlisted again meanwhile.
-- ARGV: names, the times that they were found under, and the new times in turn; an empty one removes.
for each = 1, #ARGV, 3 do
    local found = redis.call('ZSCORE', KEYS[1], ARGV[each])
    if found and tonumber(found) == tonumber(ARGV[each + 1]) then
        if ARGV[each + 2] == '' then
            redis.call('ZREM', KEYS[1], ARGV[each])
        else
            redis.call('ZADD', KEYS[1], ARGV[each + 2], ARGV[each])
        end
    end
end
return 1
