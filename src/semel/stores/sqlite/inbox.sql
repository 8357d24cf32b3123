-- What the inbox says to SQLite, in the transaction of a message's handler, which has the write lock from its beginning.
-- Only this database's own clock tells the time, in milliseconds.

-- name: look
-- Read the message's receipt. The write lock is every message's lock.
SELECT
    true AS has_lock, false AS is_read_only, NULL AS powerless_role,
    receipt.state, receipt.attempts, receipt.digest, receipt.error, receipt.changed_at AS mark
FROM (SELECT 1) AS always
LEFT JOIN semel_inbox AS receipt ON receipt.consumer = :consumer AND receipt.message_id = :message_id

-- name: note_done
-- The receipt of a message that was handled. No row comes back if there is one already.
INSERT INTO semel_inbox (consumer, message_id, state, attempts, digest, received_at, changed_at)
SELECT :consumer, :message_id, 'done', 0, :digest, now, now FROM semel_keys_clock WHERE true
ON CONFLICT (consumer, message_id) DO UPDATE SET
    state = 'done', digest = coalesce(excluded.digest, digest), changed_at = excluded.changed_at, error = NULL
WHERE state <> 'done'
RETURNING state, attempts, digest, error, changed_at

-- name: note_failure
-- Count a failed try, in a transaction of its own: the handler's was rolled back.
INSERT INTO semel_inbox (consumer, message_id, state, attempts, digest, received_at, changed_at, error)
SELECT
    :consumer, :message_id, CASE WHEN :max_attempts <= 1 THEN 'parked' ELSE 'failing' END, 1, :digest, now, now, :error
FROM semel_keys_clock WHERE true
ON CONFLICT (consumer, message_id) DO UPDATE SET
    state = CASE WHEN attempts + 1 >= :max_attempts THEN 'parked' ELSE 'failing' END,
    attempts = attempts + 1,
    digest = coalesce(excluded.digest, digest),
    changed_at = excluded.changed_at,
    error = excluded.error
WHERE state <> 'done'
RETURNING state, attempts, digest, error, changed_at

-- name: list
-- What waits for another try, or for a person; the newest first.
-- The consumers of which any has trouble are hopped along semel_inbox_trouble, up to :most, and of each at most :limit
-- messages in each state are read: handled ones are not, nor is what else has trouble.
WITH RECURSIVE troubled (name, number) AS (
    SELECT coalesce(:consumer, (SELECT min(consumer) FROM semel_inbox WHERE state <> 'done')), 1
    UNION ALL
    SELECT (SELECT min(consumer) FROM semel_inbox WHERE state <> 'done' AND consumer > name), number + 1
    FROM troubled
    WHERE name IS NOT NULL AND number < :most AND :consumer IS NULL
), wanted (kind) AS (
    VALUES ('failing'), ('parked')
)
SELECT
    consumer, message_id, state, attempts, digest, error,
    received_at / 1000.0, changed_at / 1000.0, now / 1000.0
FROM troubled
CROSS JOIN wanted
CROSS JOIN semel_inbox ON semel_inbox.rowid IN (
    SELECT rowid FROM semel_inbox
    WHERE state <> 'done' AND state = wanted.kind AND consumer = troubled.name
    ORDER BY changed_at DESC
    LIMIT :limit
)
CROSS JOIN semel_keys_clock
WHERE kind = coalesce(:state, kind)
ORDER BY changed_at DESC
LIMIT :limit

-- name: find
-- The receipt of one message, for one consumer.
SELECT
    consumer, message_id, state, attempts, digest, error,
    received_at / 1000.0, changed_at / 1000.0, now / 1000.0
FROM semel_inbox, semel_keys_clock
WHERE consumer = :consumer AND message_id = :message_id

-- name: consumers
-- The consumers of which there is anything.
SELECT DISTINCT consumer FROM semel_inbox ORDER BY consumer

-- name: requeue
-- Let the next delivery be the first try again. With :seen_at, only if it is still as it was seen.
UPDATE semel_inbox
SET state = 'failing', attempts = 0, changed_at = (SELECT now FROM semel_keys_clock)
WHERE
    consumer = :consumer AND message_id = :message_id AND state <> 'done'
    AND (
        :seen_at IS NULL
        OR (changed_at / 1000.0 = :seen_at AND state = :seen_state AND attempts = :seen_attempts)
    )
RETURNING state

-- name: drop
-- Give a message up: a delivery of it runs nothing any more. The receipt goes when it is past its retention.
UPDATE semel_inbox
SET state = 'done', changed_at = (SELECT now FROM semel_keys_clock)
WHERE
    consumer = :consumer AND message_id = :message_id AND state <> 'done'
    AND (
        :seen_at IS NULL
        OR (changed_at / 1000.0 = :seen_at AND state = :seen_state AND attempts = :seen_attempts)
    )
RETURNING state

-- name: note
-- A line of the audit trail, in the transaction of the change.
INSERT INTO semel_audit (at, scope, key, attempt, event, actor, detail)
SELECT now, :scope, :message_id, :attempts, :event, :actor, :detail FROM semel_keys_clock
RETURNING id
