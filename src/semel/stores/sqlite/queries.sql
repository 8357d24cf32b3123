-- Every statement of the SQLite store. Rows in a VALUES list are repeated, so that one statement serves many requests.
-- now is read from semel_keys_clock, this database's own clock: no time ever comes from an application. If it is a
-- parameter, it was read from there in the same transaction.
-- The statements of upkeep and operators are at the end, after those of requests.
-- Lists such as IN ('complete', 'failed') are avoided: SQLite builds a small tree for each, in every execution.

-- name: find
-- What is there under one key. A replay is this statement and nothing else: it writes nothing and takes no write lock.
-- In atomic mode it is also the first statement of the application's transaction.
-- The clock is named once, since SQLite computes each mention of it separately.
SELECT
    state, attempt, token, fingerprint, status, headers, body, lease_expires_at, expires_at, now, steps, accepted,
    traceparent
FROM semel_keys, semel_keys_clock
WHERE scope = :scope AND key = :key

-- name: find_all
-- The same for many keys: beginning a read and reading the clock takes longer than finding a key.
-- CROSS JOIN is SQLite's way to fix the order of a join: every wanted key is looked up by the primary key.
WITH wanted (position, scope, key) AS (VALUES (:position, :scope, :key))
SELECT
    state, attempt, token, fingerprint, status, headers, body, lease_expires_at, expires_at, now, steps, accepted,
    traceparent, position
FROM wanted CROSS JOIN semel_keys USING (scope, key) CROSS JOIN semel_keys_clock

-- name: claim
-- Take every key that is free. Fewer rows than claims: some keys are in use, and the caller reads which (find).
-- What the claims share (their policy's terms, and the time) comes first, and is passed once.
INSERT INTO semel_keys (
    state, attempt, created_at, lease_expires_at, expires_at, on_crash, after_retention, accepted,
    scope, key, token, fingerprint, request_line, traceparent, request, request_body
)
VALUES (
    :state, 1, :now, :lease_expires_at, :expires_at, :on_crash, :after_retention, :accepted,
    :scope, :key, :token, :fingerprint, :request_line, :traceparent, :request, :request_body
)
ON CONFLICT (scope, key) DO NOTHING

-- name: take_over
-- Take the key over after its lease ran out, or from a record past its retention, if no other process did meanwhile.
-- Past its retention it is a new operation; before, it is still the same one, and keeps its creation time, fingerprint,
-- steps and stored request. A pending one is begun by a worker only, and that is still its first attempt. An unknown one
-- never expires: an operator has to resolve it.
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
    traceparent = CASE
        WHEN expires_at <= now THEN mine.traceparent ELSE coalesce(mine.traceparent, semel_keys.traceparent)
    END,
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
            :traceparent AS traceparent, :request AS request, :request_body AS request_body, :accepted AS accepted, :made_at AS made_at,
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
    AND (expires_at > now OR semel_keys.token <> mine.token)
RETURNING attempt, state

-- name: complete_one
-- Store how it ended, if attempt and token are still those of the record. No row: it was stored before, or is fenced,
-- and the caller reads which (find).
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
-- The same for many, in one statement. It has to collect its rows first, so for a few rows the other is faster.
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
-- Free the key: nothing happened. Attempt 0 stands for the attempt with this token, whatever its number.
DELETE FROM semel_keys
WHERE
    scope = :scope AND key = :key AND token = :token AND :attempt IN (0, attempt)
    AND (state = 'pending' OR (state = 'processing' AND attempt = 1 AND steps IS NULL AND NOT accepted))
RETURNING attempt

-- name: give_up
-- The same after a take-over, or after a step, since something may have happened; and for an accepted one, once a worker
-- has begun it, since its client was promised a run. The record stays without a holder (a token of zeros), and may be
-- taken over at once.
UPDATE semel_keys
SET token = zeroblob(16), lease_expires_at = (SELECT now FROM semel_keys_clock)
WHERE
    scope = :scope AND key = :key AND token = :token AND :attempt IN (0, attempt) AND state = 'processing'
    AND (attempt > 1 OR steps IS NOT NULL OR accepted)
RETURNING attempt

-- name: exists
SELECT attempt FROM semel_keys WHERE scope = :scope AND key = :key

-- name: renew_one
-- Renew a lease. No row: it is lost.
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
-- Store the steps. In a phase, this runs in the application's own transaction.
-- Only if the record has what the worker knows: a delayed copy must not set back later progress.
UPDATE semel_keys
SET steps = said.steps, recovery_point = said.recovery_point
FROM (SELECT :steps AS steps, :recovery_point AS recovery_point, :before AS before) AS said
WHERE
    scope = :scope AND key = :key AND attempt = :attempt AND token = :token AND state = 'processing'
    AND (semel_keys.steps IS said.before OR semel_keys.steps IS said.steps)
RETURNING attempt

-- name: mark
-- Store the progress that the handler reports.
UPDATE semel_keys
SET milestone = :milestone
WHERE scope = :scope AND key = :key AND attempt = :attempt AND token = :token AND state = 'processing'
RETURNING attempt

-- name: park
-- Stop it until an operator resolves it. Its worker may do this; or, after its lease is over, others. A pending
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
-- Write the finished record, in the application's own transaction, if there is none; or replace the one that was
-- seen there, if that may still be taken over. A record that is not past its retention is still the same operation.
INSERT INTO semel_keys (
    scope, key, state, attempt, token, fingerprint, request_line, traceparent, on_crash, after_retention,
    created_at, completed_at, expires_at, status, headers, body
)
SELECT
    :scope, :key, :state, :attempt, :token, :fingerprint, :request_line, :traceparent, :on_crash,
    iif(mine.after_retention = 'strip' AND mine.made_at <= now, 'delete', mine.after_retention),
    now, now, now + :retention, :status, :headers, :body
FROM semel_keys_clock, (SELECT :after_retention AS after_retention, :made_at AS made_at) AS mine WHERE true -- without it, ON would be parsed as part of a join
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
    traceparent = CASE
        WHEN expires_at <= excluded.created_at THEN excluded.traceparent
        ELSE coalesce(excluded.traceparent, traceparent)
    END,
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
-- Lines of the audit trail, in the transaction of the change that they describe.
INSERT INTO semel_audit (at, actor, scope, key, attempt, event, detail)
VALUES (:now, :actor, :scope, :key, :attempt, :event, :detail)

-- name: write_down_inside
-- The same in the application's transaction. It returns a row, since some drivers fail if a statement returns none.
INSERT INTO semel_audit (at, scope, key, attempt, event, actor, detail)
SELECT now, :scope, :key, :attempt, :event, :actor, :detail FROM semel_keys_clock
RETURNING id

-- name: look
-- One whole record, for operators.
SELECT
    scope, key, state, attempt, token, fingerprint, recovery_point, steps, status, headers, body,
    accepted, milestone, request_line, traceparent,
    created_at, lease_expires_at, completed_at, expires_at, lease_expires_at - now, expires_at - now
FROM semel_keys, semel_keys_clock
WHERE scope = :scope AND key = :key

-- name: browse
-- The newest records, for operators. Bodies are not read: typeof() does not read its argument's content. Nor is the
-- trace, which is stored behind the body.
SELECT
    scope, key, state, attempt, token, fingerprint, recovery_point, steps, status, headers,
    CASE typeof(body) WHEN 'null' THEN NULL ELSE x'' END,
    accepted, milestone, request_line, NULL,
    created_at, lease_expires_at, completed_at, expires_at, lease_expires_at - now, expires_at - now
FROM semel_keys, semel_keys_clock
WHERE key = coalesce(:key, key) AND scope = coalesce(:scope, scope) AND state = coalesce(:state, state)
ORDER BY created_at DESC, semel_keys.rowid DESC
LIMIT :limit

-- name: walk
-- A part of all records, for a search, the newest first: SQLite has no index by age, but a rowid grows with each record.
SELECT rowid, created_at, key FROM semel_keys WHERE rowid < :row ORDER BY rowid DESC LIMIT :scan

-- name: walk_unfinished
-- The same of those that have not ended, along their index.
SELECT rowid, created_at, key
FROM semel_keys
WHERE status IS NULL AND (created_at, rowid) < (:at, :row)
ORDER BY created_at DESC, rowid DESC
LIMIT :scan

-- name: walk_scope
-- Those of one scope, if they are few.
SELECT rowid, created_at, key FROM semel_keys WHERE scope = :scope LIMIT :scan

-- name: search
-- Of some records those that fit, by age or by rowid. As with browse, bodies are not read.
SELECT
    semel_keys.rowid,
    scope, key, state, attempt, token, fingerprint, recovery_point, steps, status, headers,
    CASE typeof(body) WHEN 'null' THEN NULL ELSE x'' END,
    accepted, milestone, request_line, NULL,
    created_at, lease_expires_at, completed_at, expires_at, lease_expires_at - now, expires_at - now
FROM semel_keys, semel_keys_clock
WHERE
    semel_keys.rowid IN (SELECT value FROM json_each(:places))
    AND scope = coalesce(:scope, scope)
    AND key = coalesce(:key, key)
    AND state = coalesce(:state, state)
    AND (NOT :stuck OR lease_expires_at <= now)
    AND (:endpoint IS NULL OR instr(request_line, :endpoint))
    AND (:newer IS NULL OR created_at >= now - :newer)
    AND (:older IS NULL OR created_at <= now - :older)
    AND (:lowest IS NULL OR status BETWEEN :lowest AND :highest)
    AND (
        :reason IS NULL
        OR EXISTS (
            SELECT 1 FROM semel_audit AS line
            WHERE line.scope = semel_keys.scope AND line.key = semel_keys.key AND instr(line.detail, :reason)
        )
    )
ORDER BY CASE WHEN :by_age THEN created_at ELSE semel_keys.rowid END DESC, semel_keys.rowid DESC
LIMIT :limit

-- name: keys_after
-- A part of all keys, in rowid order: SQLite has no digest function, so digests are computed in Python.
SELECT rowid, scope, key FROM semel_keys WHERE rowid > :place ORDER BY rowid LIMIT :limit

-- name: find_stuck
-- Records in progress under an expired lease, and those that wait for their first worker, by age. Scopes take turns, and
-- of each scope the longest silent comes first. Those past their retention are left to the reaper.
-- A record without a status has not ended. The condition is written as in the index on unfinished records: otherwise
-- SQLite would not use that index.
-- The rule for the pauses is the same as in core/upkeep.py.
SELECT
    scope, key, attempt, token, on_crash, steps, request IS NOT NULL,
    now - coalesce(lease_expires_at, created_at), tries, accepted
FROM semel_keys, semel_keys_clock
WHERE
    status IS NULL
    AND CASE state WHEN 'processing' THEN lease_expires_at <= now WHEN 'pending' THEN :with_pending ELSE false END
    AND expires_at > now
    AND (request IS NOT NULL OR NOT :with_request)
    AND (token <> zeroblob(16) OR :with_no_token)
    AND (
        NOT :only_due
        OR (accepted AND (tries = 0 OR token <> zeroblob(16)))
        OR now - coalesce(lease_expires_at, created_at) >= :first_pause << min(tries - accepted, :most_doublings)
    )
ORDER BY
    row_number() OVER (PARTITION BY scope ORDER BY coalesce(lease_expires_at, created_at)),
    coalesce(lease_expires_at, created_at)
LIMIT :limit

-- name: add_counts
-- Add what a process has counted to the counts of this minute.
INSERT INTO semel_counts AS there (minute, outcome, n)
SELECT now / 60000 * 60000, key, value FROM json_each(:counts), semel_keys_clock WHERE true
ON CONFLICT (minute, outcome) DO UPDATE SET n = there.n + excluded.n

-- name: delete_counts
-- Those that are two hours old.
DELETE FROM semel_counts WHERE minute < (SELECT now - 7200000 FROM semel_keys_clock)

-- name: read_counts
-- What was counted in the last minutes; one row at least, for the time.
SELECT now, minute, outcome, n
FROM semel_keys_clock LEFT JOIN semel_counts ON minute > now - 60000 * :minutes

-- name: survey
-- What graphs and people see of the store: counts up to :limit, ages in seconds. Each part reads at most so many entries of
-- an index, whatever the size of the table: of those that have not ended, parked ones among them, the oldest and the
-- newest.
-- In progress without a token: a worker gave it back, and it waits for its next request.
WITH unfinished AS MATERIALIZED (
    SELECT * FROM (
        SELECT rowid AS number, state, token, created_at, lease_expires_at FROM semel_keys
        WHERE status IS NULL ORDER BY created_at LIMIT 2 * :limit
    )
    UNION
    SELECT * FROM (
        SELECT rowid AS number, state, token, created_at, lease_expires_at FROM semel_keys
        WHERE status IS NULL ORDER BY created_at DESC LIMIT 2 * :limit
    )
), newest AS MATERIALIZED (
    SELECT state, created_at FROM semel_keys ORDER BY rowid DESC LIMIT :newest
), judged AS MATERIALIZED (
    SELECT
        number, created_at,
        CASE
            WHEN state = 'pending' THEN 'accepted'
            WHEN state = 'unknown' THEN 'parked'
            WHEN lease_expires_at > now THEN 'in flight'
            WHEN token <> zeroblob(16) THEN 'stuck'
            ELSE 'free'
        END AS what
    FROM unfinished, semel_keys_clock
), counted AS MATERIALIZED (
    SELECT what, min(count(*), :limit) AS count, min(created_at) AS since FROM judged GROUP BY what
)
--[messages
, unsent AS MATERIALIZED (
    SELECT created_at FROM (
        SELECT created_at FROM semel_outbox WHERE state = 'ready' ORDER BY aggregatetype, seq LIMIT :limit
    )
    UNION ALL
    SELECT created_at FROM (
        SELECT created_at FROM semel_outbox WHERE state = 'waiting' ORDER BY aggregatetype, due_at LIMIT :limit
    )
    UNION ALL
    SELECT created_at FROM (
        SELECT created_at, state FROM semel_outbox
        WHERE (state = 'waiting' OR state = 'behind' OR state = 'dead') AND aggregateid IS NOT NULL
        ORDER BY aggregatetype, aggregateid, seq
        LIMIT :limit
    ) WHERE state = 'behind'
)
--]
SELECT
    now, oldest.scope, oldest.key, oldest.created_at,
    coalesce((SELECT count FROM counted WHERE what = 'free'), 0),
    (SELECT count(*) FROM newest), (SELECT min(created_at) FROM newest),
    (SELECT count(*) FROM newest WHERE state = 'complete'), (SELECT count(*) FROM newest WHERE state = 'failed'),
    (SELECT count(*) FROM newest WHERE created_at > :since),
    (SELECT count(*) FROM unfinished) >= 4 * :limit,
    coalesce((SELECT count FROM counted WHERE what = 'in flight'), 0),
    coalesce((SELECT count FROM counted WHERE what = 'stuck'), 0),
    coalesce((SELECT count FROM counted WHERE what = 'parked'), 0),
    coalesce((SELECT count FROM counted WHERE what = 'accepted'), 0),
    (SELECT count(*) FROM (
        SELECT 1 FROM semel_keys
        WHERE after_retention <> 'keep' AND expires_at <= now
          AND state <> 'unknown' AND (lease_expires_at IS NULL OR lease_expires_at <= now)
        ORDER BY expires_at
        LIMIT :limit
    )),
    coalesce((now - (SELECT since FROM counted WHERE what = 'in flight')) / 1000.0, 0.0),
    coalesce((now - (SELECT since FROM counted WHERE what = 'accepted')) / 1000.0, 0.0)
--[messages
    , (SELECT min(count(*), :limit) FROM unsent),
    (SELECT coalesce(max(now - created_at) / 1000.0, 0.0) FROM unsent),
    (SELECT count(*) FROM (
        SELECT 1 FROM semel_outbox WHERE state = 'dead' AND (state = 'dead' OR state = 'sent') LIMIT :limit
    )),
    (SELECT count(*) FROM (
        SELECT state FROM semel_inbox WHERE state <> 'done' ORDER BY consumer DESC, state DESC, changed_at DESC LIMIT :limit
    ) WHERE state = 'parked')
--]
FROM semel_keys_clock
LEFT JOIN semel_keys AS oldest
    ON oldest.rowid = (SELECT number FROM judged WHERE what = 'in flight' ORDER BY created_at LIMIT 1)

-- name: read_request
SELECT request, request_body FROM semel_keys
WHERE scope = :scope AND key = :key AND attempt = :attempt AND token = :token AND request IS NOT NULL

-- name: sweep
-- Free a dead worker's key. It has no holder then (a token of zeros), so that a worker that still lives is fenced.
UPDATE semel_keys
SET token = zeroblob(16)
WHERE
    scope = :scope AND key = :key AND attempt = :attempt AND token = :token AND state = 'processing'
    AND lease_expires_at <= (SELECT now FROM semel_keys_clock)
RETURNING attempt

-- name: find_due
-- Records past their retention, oldest first, and what to do with each. Records in progress and parked ones are left
-- out: there are few of them.
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
-- The answer is deleted, and a tombstone stays, so that a late retry is refused.
UPDATE semel_keys
SET headers = '[]', body = NULL, steps = NULL, recovery_point = NULL, after_retention = 'keep'
WHERE rowid IN (VALUES (:id))

-- name: fail_due
-- It did not end. It has no holder then: its worker, if it still lives, must not believe that its own answer was kept.
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

-- name: walk_owner
-- The records of one owner, along the primary key. typeof() does not read its argument's content, nor what is before it.
SELECT
    rowid, scope, key, state,
    status IS NOT NULL AND (
        headers <> '[]' OR typeof(body) <> 'null' OR typeof(steps) <> 'null' OR typeof(recovery_point) <> 'null'
        OR typeof(milestone) <> 'null' OR typeof(request_line) <> 'null' OR typeof(traceparent) <> 'null'
    )
FROM semel_keys
WHERE (scope, key) > (:at_scope, :at_key) AND scope < :end
ORDER BY scope, key LIMIT :limit

-- name: erase
-- Leave a tombstone of each, without content: a retry is refused, and runs nothing.
UPDATE semel_keys
SET
    headers = '[]', body = NULL, steps = NULL, recovery_point = NULL, milestone = NULL, request_line = NULL,
    traceparent = NULL
WHERE rowid IN (SELECT value FROM json_each(:places))

-- name: walk_lines
-- The lines of one owner, and whether each may go: those of an operation that has not ended stay with it.
SELECT
    scope, key, id,
    NOT EXISTS (
        SELECT 1 FROM semel_keys AS record
        WHERE record.scope = line.scope AND record.key = line.key AND record.status IS NULL
    )
FROM semel_audit AS line
WHERE (scope, key, id) > (:at_scope, :at_key, :at_id) AND scope < :end
ORDER BY scope, key, id LIMIT :limit

-- name: erase_lines
DELETE FROM semel_audit WHERE id IN (SELECT value FROM json_each(:places))

-- name: discard
-- An operator frees the key, whatever it did.
DELETE FROM semel_keys
WHERE scope = :scope AND key = :key AND attempt = :attempt AND token = :token AND status IS NULL
RETURNING attempt

-- name: unpark
-- An operator has said what the effect did: the next attempt goes on from there. It counts as an attempt, the
-- operator's. The completer's count of tries starts again from zero, and so does the retention, which may be over.
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
-- An operator has said that it took effect: this is its answer, kept for a whole retention from now on.
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
-- Lines are in the order of their time, so the old ones are first. Nothing after them is read.
DELETE FROM semel_audit
WHERE
    id IN (SELECT id FROM semel_audit ORDER BY id LIMIT :limit)
    AND at <= (SELECT now FROM semel_keys_clock) - :older_than

-- name: reap_inbox
-- Delete old receipts of handled messages: along semel_inbox_age, from its old end. Nothing else is read.
DELETE FROM semel_inbox
WHERE
    rowid IN (
        SELECT rowid FROM semel_inbox
        WHERE state = 'done' AND changed_at <= (SELECT now FROM semel_keys_clock) - :older_than
        ORDER BY changed_at
        LIMIT :limit
    )

-- name: now
SELECT now FROM semel_keys_clock

-- name: applied
SELECT name FROM semel_keys_migrations

-- name: write_nothing
-- Fails if the file is read-only. BEGIN IMMEDIATE does not: it only begins a read then.
DELETE FROM semel_keys_migrations WHERE false

-- name: apply
INSERT INTO semel_keys_migrations (name, applied_at) SELECT :name, now FROM semel_keys_clock
