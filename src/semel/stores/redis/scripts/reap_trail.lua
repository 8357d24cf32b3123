-- name: reap_trail
-- Delete some of the lines of one audit trail that are older than so much. Lines are in the order of their time.
-- ARGV: limit, age. Answers how many were deleted.
local clock = redis.call('TIME')
local newest = clock[1] * 1000000 + clock[2] - ARGV[2]
local count = 0
for _, line in ipairs(redis.call('LRANGE', KEYS[1], 0, ARGV[1] - 1)) do
    if tonumber(string.match(line, '^%-?%d+')) > newest then
        break
    end
    count = count + 1
end
if count > 0 then
    redis.call('LTRIM', KEYS[1], count, -1)
end
return count
