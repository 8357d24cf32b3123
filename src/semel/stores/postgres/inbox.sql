-- What the inbox says to PostgreSQL, in the transaction of a message's handler. Only the server's clock tells the time.
-- Casts are spelled CAST, and text comes before numbers: every driver sends these.

-- name: look
-- Take the message's lock, without waiting, and read its receipt. The snapshot may be older than the lock: the second
-- look is not. A server that can't be written, or a role that may not, is found before the handler runs.
SELECT pg_try_advisory_xact_lock(CAST(CAST(:lock AS text) AS bigint)) AS has_lock,
       CAST(current_setting('transaction_read_only') AS boolean) AS is_read_only,
       CASE WHEN NOT (has_any_column_privilege(CAST('semel_inbox' AS regclass), 'INSERT')
                      AND has_any_column_privilege(CAST('semel_inbox' AS regclass), 'UPDATE'))
            THEN CAST(current_user AS text) END AS powerless_role,
       receipt.state, receipt.attempts, receipt.digest, receipt.error,
       CAST(EXTRACT(EPOCH FROM receipt.changed_at) * 1000000 AS bigint) AS mark
  FROM (SELECT set_config('semel.table', coalesce(CAST(CAST(to_regclass('semel_keys') AS oid) AS text), 'none'), true) OFFSET 0) AS always
  LEFT JOIN semel_inbox AS receipt
    ON receipt.consumer = CAST(:consumer AS text) AND receipt.message_id = CAST(:message_id AS text)

-- name: note_done
-- The receipt of a message that was handled. No row comes back if there is one already, and under REPEATABLE READ this
-- fails if one was committed since the snapshot: in either case the handler's writes are rolled back. It fails, too, where
-- the handler has changed the search path, and another table is found (joined.py).
INSERT INTO semel_inbox AS receipt (consumer, message_id, state, attempts, digest)
VALUES (CAST(:consumer AS text), CAST(:message_id AS text), 'done',
        CAST(CASE WHEN current_setting('semel.table', true)
                       NOT IN ('', coalesce(CAST(CAST(to_regclass('semel_keys') AS oid) AS text), 'none'))
                  THEN 'semel: moved' ELSE '0' END AS integer), CAST(:digest AS bytea))
    ON CONFLICT (consumer, message_id) DO UPDATE
   SET state = 'done', digest = coalesce(excluded.digest, receipt.digest), changed_at = clock_timestamp(), error = NULL
 WHERE receipt.state <> 'done'
RETURNING state, attempts, digest, error, CAST(EXTRACT(EPOCH FROM changed_at) * 1000000 AS bigint)

-- name: note_failure
-- Count a failed try, in a transaction of its own: the handler's was rolled back.
INSERT INTO semel_inbox AS receipt (consumer, message_id, state, attempts, digest, error)
VALUES (CAST(:consumer AS text), CAST(:message_id AS text),
        CASE WHEN CAST(:max_attempts AS integer) <= 1 THEN 'parked' ELSE 'failing' END, CAST(1 AS integer),
        CAST(:digest AS bytea), CAST(:error AS text))
    ON CONFLICT (consumer, message_id) DO UPDATE
   SET state = CASE WHEN receipt.attempts + 1 >= CAST(:max_attempts AS integer) THEN 'parked' ELSE 'failing' END,
       attempts = receipt.attempts + 1, digest = coalesce(excluded.digest, receipt.digest),
       changed_at = clock_timestamp(), error = excluded.error
 WHERE receipt.state <> 'done'
RETURNING state, attempts, digest, error, CAST(EXTRACT(EPOCH FROM changed_at) * 1000000 AS bigint)

-- name: list
-- What waits for another try, or for a person; the newest first.
-- The consumers of which any has trouble are hopped along semel_inbox_trouble, up to :most, and of each at most :limit
-- messages in each state are read: handled ones are not, nor is what else has trouble.
WITH RECURSIVE troubled (consumer, number) AS (
    SELECT coalesce(CAST(:consumer AS text), (SELECT consumer FROM semel_inbox WHERE state <> 'done'
                                                ORDER BY consumer LIMIT 1)), 1
    UNION ALL
    SELECT (SELECT next.consumer FROM semel_inbox AS next
             WHERE next.state <> 'done' AND next.consumer > troubled.consumer
             ORDER BY next.consumer LIMIT 1), number + 1
      FROM troubled
     WHERE troubled.consumer IS NOT NULL AND number < CAST(:most AS integer) AND CAST(:consumer AS text) IS NULL
)
SELECT found.*, CAST(EXTRACT(EPOCH FROM clock_timestamp()) AS float8)
  FROM troubled
 CROSS JOIN (VALUES ('failing'), ('parked')) AS wanted (state)
 CROSS JOIN LATERAL (
    SELECT consumer, message_id, state, attempts, digest, error, CAST(EXTRACT(EPOCH FROM received_at) AS float8),
           CAST(EXTRACT(EPOCH FROM changed_at) AS float8) AS changed_at
      FROM semel_inbox
     WHERE state <> 'done' AND state = wanted.state AND consumer = troubled.consumer
     ORDER BY semel_inbox.changed_at DESC
     LIMIT CAST(:limit AS integer)
 ) AS found
 WHERE wanted.state = coalesce(CAST(:state AS text), wanted.state)
 ORDER BY found.changed_at DESC
 LIMIT CAST(:limit AS integer)

-- name: find
-- The receipt of one message, for one consumer.
SELECT consumer, message_id, state, attempts, digest, error, CAST(EXTRACT(EPOCH FROM received_at) AS float8),
       CAST(EXTRACT(EPOCH FROM changed_at) AS float8), CAST(EXTRACT(EPOCH FROM clock_timestamp()) AS float8)
  FROM semel_inbox
 WHERE consumer = CAST(:consumer AS text) AND message_id = CAST(:message_id AS text)

-- name: consumers
-- The consumers of which there is anything, one look-up for each.
WITH RECURSIVE one (consumer) AS (
    (SELECT consumer FROM semel_inbox ORDER BY consumer LIMIT 1)
    UNION ALL
    SELECT (SELECT next.consumer FROM semel_inbox AS next WHERE next.consumer > one.consumer ORDER BY 1 LIMIT 1)
      FROM one
     WHERE one.consumer IS NOT NULL
)
SELECT consumer FROM one WHERE consumer IS NOT NULL

-- name: requeue
-- Let the next delivery be the first try again. With :seen_at, only if it is still as it was seen.
UPDATE semel_inbox
   SET state = 'failing', attempts = 0, changed_at = clock_timestamp()
 WHERE consumer = CAST(:consumer AS text) AND message_id = CAST(:message_id AS text) AND state <> 'done'
   AND (CAST(:seen_at AS float8) IS NULL
        OR (CAST(EXTRACT(EPOCH FROM changed_at) AS float8) = CAST(:seen_at AS float8)
            AND state = CAST(:seen_state AS text) AND attempts = CAST(:seen_attempts AS integer)))
RETURNING state

-- name: drop
-- Give a message up: a delivery of it runs nothing any more. The receipt goes when it is past its retention.
UPDATE semel_inbox
   SET state = 'done', changed_at = clock_timestamp()
 WHERE consumer = CAST(:consumer AS text) AND message_id = CAST(:message_id AS text) AND state <> 'done'
   AND (CAST(:seen_at AS float8) IS NULL
        OR (CAST(EXTRACT(EPOCH FROM changed_at) AS float8) = CAST(:seen_at AS float8)
            AND state = CAST(:seen_state AS text) AND attempts = CAST(:seen_attempts AS integer)))
RETURNING state

-- name: note
-- A line of the audit trail, in the transaction of the change.
INSERT INTO semel_audit (at, scope, key, attempt, event, actor, detail)
VALUES (clock_timestamp(), CAST(:scope AS text), CAST(:message_id AS text), CAST(:attempts AS integer),
        CAST(:event AS text), CAST(:actor AS text), CAST(:detail AS text))
RETURNING id
