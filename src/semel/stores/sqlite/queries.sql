-- Every statement of the SQLite store. Rows in a VALUES list are repeated, so that one statement serves many requests.
-- now is read from semel_keys_clock, this database's own clock: no time ever comes from an application. Where it is a
-- parameter, it was read from there in the same transaction.
-- What upkeep and operators do is at the end, after what serves requests.
-- Lists such as IN ('complete', 'failed') are avoided: SQLite builds a small tree of each, whenever it comes by.

-- name: find
-- What is there under one key. A replay is this statement and nothing else: it writes nothing and takes no write lock.
-- In atomic mode it is also the first statement of the application's transaction.
-- The clock is named once, since each mention of it is computed by itself.
SELECT
    state, attempt, token, fingerprint, status, headers, body, lease_expires_at, expires_at, now, steps, accepted
FROM semel_keys, semel_keys_clock
WHERE scope = :scope AND key = :key

-- name: find_all
-- The same for many keys: to begin to read, and to tell the time, takes longer than to find a key.
-- CROSS JOIN is SQLite's way to fix the order of a join: every wanted key is looked up by the primary key.
WITH wanted (position, scope, key) AS (VALUES (:position, :scope, :key))
SELECT
    state, attempt, token, fingerprint, status, headers, body, lease_expires_at, expires_at, now, steps, accepted,
    position
FROM wanted CROSS JOIN semel_keys USING (scope, key) CROSS JOIN semel_keys_clock

-- name: claim
-- Take every key that is free. Fewer rows than claims: others were quicker, and the caller looks which (find).
-- What the claims share (their policy's terms, and the time) comes first, and is given once.
INSERT INTO semel_keys (
    state, attempt, created_at, lease_expires_at, expires_at, on_crash, after_retention, accepted,
    scope, key, token, fingerprint, request_line, request, request_body
)
VALUES (
    :state, 1, :now, :lease_expires_at, :expires_at, :on_crash, :after_retention, :accepted,
    :scope, :key, :token, :fingerprint, :request_line, :request, :request_body
)
ON CONFLICT (scope, key) DO NOTHING

-- name: take_over
-- Take the key from a holder whose lease ran out, or from a record past its retention, if nobody else did meanwhile.
-- Past its retention it starts anew; before, it is still the same operation, and keeps its first sight and fingerprint,
-- the steps it has taken and the request that it came with. One that is pending is begun, by a worker alone, and that is
-- its first attempt still. What is unknown never expires: an operator has to say what it did.
UPDATE semel_keys
SET
    state = CASE WHEN expires_at <= now AND mine.accepted THEN 'pending' ELSE 'processing' END,
    attempt = CASE WHEN expires_at <= now THEN 1 WHEN state = 'pending' THEN attempt ELSE attempt + 1 END,
    token = mine.token,
    fingerprint = CASE WHEN expires_at <= now THEN mine.fingerprint ELSE semel_keys.fingerprint END,
    recovery_point = CASE WHEN expires_at <= now THEN NULL ELSE recovery_point END,
    steps = CASE WHEN expires_at <= now THEN NULL ELSE steps END,
    on_crash = CASE WHEN expires_at <= now THEN mine.on_crash ELSE semel_keys.on_crash END,
    after_retention = CASE
        WHEN expires_at > now THEN semel_keys.after_retention
        WHEN mine.after_retention = 'strip' AND mine.made_at <= now THEN 'delete'
        ELSE mine.after_retention
    END,
    request_line = CASE WHEN expires_at <= now THEN mine.request_line ELSE semel_keys.request_line END,
    request = CASE WHEN expires_at <= now THEN mine.request ELSE semel_keys.request END,
    request_body = CASE WHEN expires_at <= now THEN mine.request_body ELSE semel_keys.request_body END,
    tries = CASE WHEN expires_at <= now THEN 0 ELSE tries + mine.is_abandoned END,
    created_at = CASE WHEN expires_at <= now THEN now ELSE created_at END,
    lease_expires_at = CASE WHEN expires_at <= now AND mine.accepted THEN NULL ELSE now + mine.lease END,
    accepted = CASE WHEN expires_at <= now THEN mine.accepted ELSE semel_keys.accepted END,
    milestone = CASE WHEN expires_at <= now THEN NULL ELSE milestone END,
    completed_at = NULL,
    expires_at = CASE WHEN expires_at <= now THEN now + mine.retention ELSE expires_at END,
    status = NULL,
    headers = NULL,
    body = NULL
FROM
    (
        SELECT
            :token AS token, :fingerprint AS fingerprint, :lease AS lease, :retention AS retention,
            :on_crash AS on_crash, :after_retention AS after_retention, :request_line AS request_line,
            :request AS request, :request_body AS request_body, :accepted AS accepted, :made_at AS made_at,
            :is_abandoned AS is_abandoned
    ) AS mine,
    semel_keys_clock
WHERE
    scope = :scope AND key = :key AND attempt = :seen_attempt AND semel_keys.token = :seen_token
    AND CASE state
        WHEN 'processing' THEN lease_expires_at <= now
        WHEN 'unknown' THEN false
        ELSE expires_at <= now OR (state = 'pending' AND mine.is_abandoned)
    END
    AND NOT (mine.is_abandoned AND expires_at <= now)
RETURNING attempt, state

-- name: complete_one
-- Store how it ended, where attempt and token still hold. No row: it was stored before, or is fenced off, and the
-- caller looks which (find).
UPDATE semel_keys
SET
    completed_at = :now,
    state = :state,
    status = :status,
    headers = :headers,
    body = :body,
    lease_expires_at = NULL,
    request = NULL,
    request_body = NULL
WHERE scope = :scope AND key = :key AND attempt = :attempt AND token = :token AND state = 'processing'

-- name: complete
-- The same for many, in one statement. It has to gather its rows first, so that for a few the other is quicker.
UPDATE semel_keys
SET
    completed_at = :now,
    state = ended.column1,
    status = ended.column2,
    headers = ended.column3,
    body = ended.column4,
    lease_expires_at = NULL,
    request = NULL,
    request_body = NULL
FROM (VALUES (:state, :status, :headers, :body, :scope, :key, :attempt, :token)) AS ended
WHERE
    scope = ended.column5 AND key = ended.column6 AND attempt = ended.column7 AND token = ended.column8
    AND semel_keys.state = 'processing'

-- name: release
-- Free the key: nothing happened. Attempt 0 stands for whatever number this token was given.
DELETE FROM semel_keys
WHERE
    scope = :scope AND key = :key AND token = :token AND :attempt IN (0, attempt)
    AND (state = 'pending' OR (state = 'processing' AND attempt = 1 AND steps IS NULL AND NOT accepted))
RETURNING attempt

-- name: give_up
-- The same after a take-over, or after a step: something may have happened; and of one that was accepted, once a worker
-- has begun it: it was promised to be run. The record stays, nobody's (a token of zeros), and is to be taken over at
-- once.
UPDATE semel_keys
SET token = zeroblob(16), lease_expires_at = (SELECT now FROM semel_keys_clock)
WHERE
    scope = :scope AND key = :key AND token = :token AND :attempt IN (0, attempt) AND state = 'processing'
    AND (attempt > 1 OR steps IS NOT NULL OR accepted)
RETURNING attempt

-- name: exists
SELECT attempt FROM semel_keys WHERE scope = :scope AND key = :key

-- name: renew_one
-- Prolong a lease. No row: it is lost.
UPDATE semel_keys
SET lease_expires_at = :now + :lease
WHERE scope = :scope AND key = :key AND attempt = :attempt AND token = :token AND state = 'processing'

-- name: renew
-- The same for many. Fewer rows than leases: some are lost, and the caller tries one by one.
UPDATE semel_keys
SET lease_expires_at = :now + held.column1
FROM (VALUES (:lease, :scope, :key, :attempt, :token)) AS held
WHERE
    scope = held.column2 AND key = held.column3 AND attempt = held.column4 AND token = held.column5
    AND state = 'processing'

-- name: save
-- Store how far it has come. In a phase, the application's own transaction runs this.
-- Only on top of what its worker knows: a copy that was held up must not set back what has gone on since.
UPDATE semel_keys
SET steps = said.steps, recovery_point = said.recovery_point
FROM (SELECT :steps AS steps, :recovery_point AS recovery_point, :before AS before) AS said
WHERE
    scope = :scope AND key = :key AND attempt = :attempt AND token = :token AND state = 'processing'
    AND (semel_keys.steps IS said.before OR semel_keys.steps IS said.steps)
RETURNING attempt

-- name: mark
-- Store how far the handler says it is.
UPDATE semel_keys
SET milestone = :milestone
WHERE scope = :scope AND key = :key AND attempt = :attempt AND token = :token AND state = 'processing'
RETURNING attempt

-- name: park
-- Stop it until an operator has said what it did. Its worker may ask for it; or, once that is silent, others. A pending
-- one has no worker yet.
UPDATE semel_keys
SET state = 'unknown', lease_expires_at = NULL
WHERE
    scope = :scope AND key = :key AND attempt = :attempt AND token = :token
    AND (state = 'processing' OR state = 'pending')
    AND (
        NOT :if_silent OR lease_expires_at IS NULL OR lease_expires_at <= (SELECT now FROM semel_keys_clock)
    )
RETURNING attempt

-- name: is_parked
SELECT attempt FROM semel_keys
WHERE scope = :scope AND key = :key AND attempt = :attempt AND token = :token AND state = 'unknown'

-- name: finish
-- Write the finished record, in the application's own transaction, where there is none; or in place of the one that was
-- seen there, if that may still be taken over. What is not past its retention is still the same operation.
INSERT INTO semel_keys (
    scope, key, state, attempt, token, fingerprint, request_line, on_crash, after_retention,
    created_at, completed_at, expires_at, status, headers, body
)
SELECT
    :scope, :key, :state, :attempt, :token, :fingerprint, :request_line, :on_crash,
    iif(mine.after_retention = 'strip' AND mine.made_at <= now, 'delete', mine.after_retention),
    now, now, now + :retention, :status, :headers, :body
FROM semel_keys_clock, (SELECT :after_retention AS after_retention, :made_at AS made_at) AS mine WHERE true -- or else ON would be read as a part of a join
ON CONFLICT (scope, key) DO UPDATE
SET
    state = excluded.state,
    attempt = excluded.attempt,
    token = excluded.token,
    fingerprint = CASE WHEN expires_at <= excluded.created_at THEN excluded.fingerprint ELSE fingerprint END,
    recovery_point = CASE WHEN expires_at <= excluded.created_at THEN NULL ELSE recovery_point END,
    steps = CASE WHEN expires_at <= excluded.created_at THEN NULL ELSE steps END,
    on_crash = CASE WHEN expires_at <= excluded.created_at THEN excluded.on_crash ELSE on_crash END,
    after_retention = CASE
        WHEN expires_at <= excluded.created_at THEN excluded.after_retention ELSE after_retention
    END,
    request_line = CASE WHEN expires_at <= excluded.created_at THEN excluded.request_line ELSE request_line END,
    request = NULL,
    request_body = NULL,
    created_at = CASE WHEN expires_at <= excluded.created_at THEN excluded.created_at ELSE created_at END,
    lease_expires_at = NULL,
    accepted = CASE WHEN expires_at <= excluded.created_at THEN 0 ELSE accepted END,
    milestone = CASE WHEN expires_at <= excluded.created_at THEN NULL ELSE milestone END,
    completed_at = excluded.completed_at,
    expires_at = CASE WHEN expires_at <= excluded.created_at THEN excluded.expires_at ELSE expires_at END,
    status = excluded.status,
    headers = excluded.headers,
    body = excluded.body
WHERE
    attempt = :seen_attempt AND token = :seen_token
    AND CASE state
        WHEN 'processing' THEN lease_expires_at <= excluded.created_at
        WHEN 'unknown' THEN false
        ELSE expires_at <= excluded.created_at
    END
RETURNING attempt

-- name: write_down
-- Lines of the audit trail, in the transaction of what they tell of.
INSERT INTO semel_audit (at, actor, scope, key, attempt, event, detail)
VALUES (:now, :actor, :scope, :key, :attempt, :event, :detail)

-- name: write_down_inside
-- The same in a transaction of the application's. It brings a row, since not every driver likes to be asked for none.
INSERT INTO semel_audit (at, scope, key, attempt, event, actor, detail)
SELECT now, :scope, :key, :attempt, :event, :actor, :detail FROM semel_keys_clock
RETURNING id

-- name: look
-- One whole record, for people.
SELECT
    scope, key, state, attempt, token, fingerprint, recovery_point, steps, status, headers, body,
    accepted, milestone, request_line,
    created_at, lease_expires_at, completed_at, expires_at, lease_expires_at - now, expires_at - now
FROM semel_keys, semel_keys_clock
WHERE scope = :scope AND key = :key

-- name: browse
-- The newest records, for people. Bodies stay behind: typeof() does not read what it names.
SELECT
    scope, key, state, attempt, token, fingerprint, recovery_point, steps, status, headers,
    CASE typeof(body) WHEN 'null' THEN NULL ELSE x'' END,
    accepted, milestone, request_line,
    created_at, lease_expires_at, completed_at, expires_at, lease_expires_at - now, expires_at - now
FROM semel_keys, semel_keys_clock
WHERE key = coalesce(:key, key) AND scope = coalesce(:scope, scope) AND state = coalesce(:state, state)
ORDER BY created_at DESC, semel_keys.rowid DESC
LIMIT :limit

-- name: keys_after
-- Some of all keys, in the order of their places: SQLite knows no digest, so that those are taken elsewhere.
SELECT rowid, scope, key FROM semel_keys WHERE rowid > :place ORDER BY rowid LIMIT :limit

-- name: find_stuck
-- What is in progress under a lease that has run out, and what waits for its first worker, by its age. Scopes take
-- turns, and of each scope the longest silent comes first. Past its retention it is the reaper's.
-- What has no status has not ended: it is spelled as in the index on what is in progress, which SQLite uses for
-- nothing else.
-- What is due after its pause is said in words of its own in core/upkeep.py.
SELECT
    scope, key, attempt, token, on_crash, steps, request IS NOT NULL,
    now - coalesce(lease_expires_at, created_at), tries, accepted
FROM semel_keys, semel_keys_clock
WHERE
    status IS NULL
    AND CASE state WHEN 'processing' THEN lease_expires_at <= now WHEN 'pending' THEN :with_pending ELSE false END
    AND expires_at > now
    AND (request IS NOT NULL OR NOT :with_request)
    AND (token <> zeroblob(16) OR :with_nobodys)
    AND (
        NOT :only_due
        OR (accepted AND (tries = 0 OR token <> zeroblob(16)))
        OR now - coalesce(lease_expires_at, created_at) >= :first_pause << min(tries - accepted, :most_doublings)
    )
ORDER BY
    row_number() OVER (PARTITION BY scope ORDER BY coalesce(lease_expires_at, created_at)),
    coalesce(lease_expires_at, created_at)
LIMIT :limit

-- name: read_request
SELECT request, request_body FROM semel_keys
WHERE scope = :scope AND key = :key AND attempt = :attempt AND token = :token AND request IS NOT NULL

-- name: sweep
-- Free a dead worker's key: nobody's (a token of zeros), so that a worker that is not dead after all is fenced off.
UPDATE semel_keys
SET token = zeroblob(16)
WHERE
    scope = :scope AND key = :key AND attempt = :attempt AND token = :token AND state = 'processing'
    AND lease_expires_at <= (SELECT now FROM semel_keys_clock)
RETURNING attempt

-- name: find_due
-- What is past its retention, oldest first, and what is to become of it. Neither what is in flight nor what is parked:
-- those few are passed by.
SELECT
    CASE WHEN status IS NULL THEN 'fail' ELSE after_retention END, semel_keys.rowid, scope, key, attempt
FROM semel_keys, semel_keys_clock
WHERE
    after_retention <> 'keep' AND expires_at <= now
    AND (lease_expires_at IS NULL OR lease_expires_at <= now) AND state <> 'unknown'
ORDER BY expires_at, semel_keys.rowid LIMIT :limit

-- name: delete_due
DELETE FROM semel_keys WHERE rowid IN (VALUES (:id))

-- name: strip_due
-- The answer goes, and a tombstone stays, for a late retry to be refused by.
UPDATE semel_keys
SET headers = '[]', body = NULL, steps = NULL, recovery_point = NULL, after_retention = 'keep'
WHERE rowid IN (VALUES (:id))

-- name: fail_due
-- Nobody ended it. It becomes nobody's: its worker, awake again, must not believe that its own answer is the one kept.
UPDATE semel_keys
SET
    state = 'failed',
    token = zeroblob(16),
    status = :status,
    headers = :headers,
    body = :body,
    completed_at = (SELECT now FROM semel_keys_clock),
    lease_expires_at = NULL,
    request = NULL,
    request_body = NULL
WHERE rowid IN (VALUES (:id))

-- name: discard
-- An operator frees the key, whatever it did.
DELETE FROM semel_keys
WHERE scope = :scope AND key = :key AND attempt = :attempt AND token = :token AND status IS NULL
RETURNING attempt

-- name: unpark
-- An operator has said what the effect did: the next attempt goes on from there. It counts as an attempt, the
-- operator's; the completer, which gives up after so many tries, begins to count anew. So does its retention, which may
-- be long over.
UPDATE semel_keys
SET
    state = 'processing',
    attempt = attempt + 1,
    token = zeroblob(16),
    lease_expires_at = (SELECT now FROM semel_keys_clock),
    expires_at = (SELECT now FROM semel_keys_clock) + expires_at - created_at,
    tries = 0,
    steps = :steps,
    recovery_point = :recovery_point
WHERE scope = :scope AND key = :key AND attempt = :attempt AND token = :token AND state = 'unknown'
RETURNING attempt

-- name: resolve
-- An operator has said that it took effect: this is its answer, kept for as long again as from its beginning.
UPDATE semel_keys
SET
    state = 'complete',
    token = zeroblob(16),
    status = :status,
    headers = :headers,
    body = :body,
    completed_at = (SELECT now FROM semel_keys_clock),
    expires_at = (SELECT now FROM semel_keys_clock) + expires_at - created_at,
    request = NULL,
    request_body = NULL
WHERE scope = :scope AND key = :key AND attempt = :attempt AND token = :token AND state = 'unknown'
RETURNING attempt

-- name: read_trail
SELECT at, scope, key, attempt, event, actor, detail FROM semel_audit
WHERE scope = :scope AND key = :key
ORDER BY id LIMIT :limit

-- name: reap_trail
-- Lines are in the order of their time: of the first ones, those that are old. Nothing beyond them is read.
DELETE FROM semel_audit
WHERE
    id IN (SELECT id FROM semel_audit ORDER BY id LIMIT :limit)
    AND at <= (SELECT now FROM semel_keys_clock) - :older_than

-- name: now
SELECT now FROM semel_keys_clock

-- name: applied
SELECT name FROM semel_keys_migrations

-- name: write_nothing
-- Fails where the file can only be read. BEGIN IMMEDIATE does not: there it only begins to read.
DELETE FROM semel_keys_migrations WHERE false

-- name: apply
INSERT INTO semel_keys_migrations (name, applied_at) SELECT :name, now FROM semel_keys_clock
