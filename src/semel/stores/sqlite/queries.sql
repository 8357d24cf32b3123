-- Every statement of the SQLite store. Rows in a VALUES list are repeated, so that one statement serves many requests.
-- now is read from semel_keys_clock, this database's own clock: no time ever comes from an application.

-- name: find
-- What is there under these keys. A replay is this statement and nothing else: it writes nothing and takes no write lock.
-- CROSS JOIN is SQLite's way to fix the order of a join: every wanted key is looked up by the primary key.
WITH wanted (position, scope, key) AS (VALUES (:position, :scope, :key))
SELECT
    position, state, attempt, token, fingerprint, status, headers, body,
    lease_expires_at IS NULL OR lease_expires_at <= now, expires_at <= now
FROM wanted CROSS JOIN semel_keys USING (scope, key) CROSS JOIN semel_keys_clock

-- name: claim
-- Take every key that nobody has. Fewer rows than claims: somebody was quicker, and the caller looks who (find).
INSERT INTO semel_keys (scope, key, state, attempt, token, fingerprint, created_at, lease_expires_at, expires_at)
WITH wanted (scope, key, token, fingerprint, lease, retention)
    AS (VALUES (:scope, :key, :token, :fingerprint, :lease, :retention))
SELECT scope, key, 'processing', 1, token, fingerprint, now, now + lease, now + retention
FROM wanted CROSS JOIN semel_keys_clock WHERE true -- or else ON would be read as a part of the join
ON CONFLICT (scope, key) DO NOTHING

-- name: take_over
-- Take the key from a holder whose lease ran out, or from an answer past its retention, if nobody else did meanwhile.
-- Past its retention it starts anew; before, it is still the same operation, and keeps its first sight and fingerprint.
UPDATE semel_keys
SET
    state = 'processing',
    attempt = CASE WHEN expires_at <= now THEN 1 ELSE semel_keys.attempt + 1 END,
    token = mine.token,
    fingerprint = CASE WHEN expires_at <= now THEN mine.fingerprint ELSE semel_keys.fingerprint END,
    recovery_point = CASE WHEN expires_at <= now THEN NULL ELSE recovery_point END,
    created_at = CASE WHEN expires_at <= now THEN now ELSE created_at END,
    lease_expires_at = now + mine.lease,
    completed_at = NULL,
    expires_at = CASE WHEN expires_at <= now THEN now + mine.retention ELSE expires_at END,
    status = NULL,
    headers = NULL,
    body = NULL
FROM
    (SELECT :token AS token, :fingerprint AS fingerprint, :lease AS lease, :retention AS retention) AS mine,
    semel_keys_clock
WHERE
    scope = :scope AND key = :key AND attempt = :seen_attempt AND semel_keys.token = :seen_token
    AND CASE state WHEN 'processing' THEN lease_expires_at <= now WHEN 'pending' THEN false ELSE expires_at <= now END

-- name: complete
-- Store how it ended, where attempt and token still hold. Fewer rows than answers: some were stored before, or are
-- fenced off, and the caller looks which (find).
UPDATE semel_keys
SET
    state = ended.state,
    status = ended.status,
    headers = ended.headers,
    body = ended.body,
    completed_at = (SELECT now FROM semel_keys_clock),
    lease_expires_at = NULL
FROM (
    WITH ended (state, status, headers, body, scope, key, attempt, token)
        AS (VALUES (:state, :status, :headers, :body, :scope, :key, :attempt, :token))
    SELECT * FROM ended
) AS ended
WHERE
    semel_keys.scope = ended.scope AND semel_keys.key = ended.key
    AND semel_keys.attempt = ended.attempt AND semel_keys.token = ended.token
    AND semel_keys.state = 'processing'

-- name: release
-- Free the key: nothing happened. Attempt 0 stands for whatever number this token was given.
DELETE FROM semel_keys
WHERE
    scope = :scope AND key = :key AND token = :token AND :attempt IN (0, attempt) AND state = 'processing'
    AND attempt = 1

-- name: give_up
-- The same after a take-over: an earlier attempt may have had its effect. The record stays, nobody's (a token of zeros),
-- and is to be taken over at once.
UPDATE semel_keys
SET token = zeroblob(16), lease_expires_at = (SELECT now FROM semel_keys_clock)
WHERE
    scope = :scope AND key = :key AND token = :token AND :attempt IN (0, attempt) AND state = 'processing'
    AND attempt > 1

-- name: exists
SELECT attempt FROM semel_keys WHERE scope = :scope AND key = :key

-- name: renew
-- Prolong these leases. Fewer rows than leases: some are lost, and the caller tries one by one.
UPDATE semel_keys
SET lease_expires_at = now + held.lease
FROM (
    WITH held (scope, key, attempt, token, lease) AS (VALUES (:scope, :key, :attempt, :token, :lease))
    SELECT * FROM held
) AS held, semel_keys_clock
WHERE
    semel_keys.scope = held.scope AND semel_keys.key = held.key
    AND semel_keys.attempt = held.attempt AND semel_keys.token = held.token
    AND semel_keys.state = 'processing'

-- name: look
-- One whole record, for people.
SELECT
    scope, key, state, attempt, token, fingerprint, recovery_point, status, headers, body,
    created_at, lease_expires_at, completed_at, expires_at, lease_expires_at - now, expires_at - now
FROM semel_keys, semel_keys_clock
WHERE scope = :scope AND key = :key

-- name: browse
-- The newest records, for people. Bodies stay behind: typeof() does not read what it names.
SELECT
    scope, key, state, attempt, token, fingerprint, recovery_point, status, headers,
    CASE typeof(body) WHEN 'null' THEN NULL ELSE x'' END,
    created_at, lease_expires_at, completed_at, expires_at, lease_expires_at - now, expires_at - now
FROM semel_keys, semel_keys_clock
WHERE key = coalesce(:key, key) AND scope = coalesce(:scope, scope) AND state = coalesce(:state, state)
ORDER BY created_at DESC, semel_keys.rowid DESC
LIMIT :limit

-- name: now
SELECT now FROM semel_keys_clock

-- name: applied
SELECT name FROM semel_keys_migrations

-- name: write_nothing
-- Fails where the file can only be read. BEGIN IMMEDIATE does not: there it only begins to read.
DELETE FROM semel_keys_migrations WHERE false

-- name: apply
INSERT INTO semel_keys_migrations (name, applied_at) SELECT :name, now FROM semel_keys_clock
