-- The statements of the outbox on SQLite. "add" joins the application's transaction; the others have one of their own,
-- with the write lock, so that no two relays claim at once. What each is for, the ones for PostgreSQL say; here there are
-- no dead index entries to walk past, and what is committed late can't have a lower number.


-- name: add
INSERT INTO semel_outbox (id, aggregatetype, aggregateid, type, content_type, headers, traceparent, payload, created_at)
SELECT :id, :to, :key, :type, :content_type, :headers, :traceparent, :payload, now
  FROM semel_keys_clock
 WHERE true
    ON CONFLICT (id) DO NOTHING
RETURNING 1


-- name: same
SELECT aggregatetype = :to AND aggregateid IS :key AND type = :type AND payload = :payload
  FROM semel_outbox
 WHERE id = :id


-- name: set_aside
-- Set aside the ready messages that can't be taken because of another of their key.
UPDATE semel_outbox
   SET state = 'behind', token = NULL, lease_until = NULL
 WHERE seq IN (SELECT seq FROM semel_outbox
                WHERE aggregatetype = :to AND state = 'ready'
                ORDER BY seq
                LIMIT :limit)
   AND aggregateid IS NOT NULL
   AND (lease_until IS NULL OR lease_until <= (SELECT now FROM semel_keys_clock))
   AND (EXISTS (SELECT 1 FROM semel_outbox AS other
                 WHERE other.aggregatetype = :to AND other.aggregateid = semel_outbox.aggregateid
                   AND other.seq < semel_outbox.seq
                   AND (other.state = 'waiting' OR other.state = 'behind' OR other.state = 'dead'))
        OR EXISTS (SELECT 1 FROM semel_outbox AS other
                    WHERE other.aggregatetype = :to AND other.aggregateid = semel_outbox.aggregateid
                      AND other.state = 'ready' AND other.seq < semel_outbox.seq
                      AND other.lease_until > (SELECT now FROM semel_keys_clock)))
RETURNING 1


-- name: again
UPDATE semel_outbox
   SET state = 'waiting', due_at = (SELECT now FROM semel_keys_clock), attempts = 0, ended_at = NULL
 WHERE id = :id AND state = 'sent'
RETURNING 1


-- name: set_behind
-- One that is due and has another of its key before it waits behind that, or it would be found due again and again.
UPDATE semel_outbox
   SET state = 'behind', token = NULL, lease_until = NULL
 WHERE seq IN (SELECT seq FROM semel_outbox
                WHERE aggregatetype = :to AND state = 'waiting' AND due_at <= (SELECT now FROM semel_keys_clock)
                  AND (lease_until IS NULL OR lease_until <= (SELECT now FROM semel_keys_clock))
                ORDER BY due_at
                LIMIT :due)
   AND aggregateid IS NOT NULL
   AND EXISTS (SELECT 1 FROM semel_outbox AS other
                WHERE other.aggregatetype = :to AND other.aggregateid = semel_outbox.aggregateid
                  AND other.seq < semel_outbox.seq
                  AND (other.state = 'waiting' OR other.state = 'behind' OR other.state = 'dead'))
RETURNING 1


-- name: claim
-- Take messages of one destination: those that are due again first, then those that are ready, oldest first.
WITH clock AS (
    SELECT now FROM semel_keys_clock
), due AS MATERIALIZED (
    SELECT seq, aggregateid, payload, attempts
      FROM semel_outbox
     WHERE aggregatetype = :to AND state = 'waiting' AND due_at <= (SELECT now FROM clock)
       AND (lease_until IS NULL OR lease_until <= (SELECT now FROM clock))
     ORDER BY due_at
     LIMIT :due
), aside AS MATERIALIZED (
    SELECT seq, aggregateid, payload FROM due
     UNION ALL
    SELECT *
      FROM (SELECT seq, aggregateid, payload
              FROM semel_outbox
             WHERE aggregatetype = :to AND state = 'behind'
               AND (state = 'waiting' OR state = 'behind' OR state = 'dead') AND aggregateid IS NOT NULL
               AND aggregateid IN (SELECT aggregateid FROM due WHERE attempts = 0 AND aggregateid IS NOT NULL)
               AND NOT EXISTS (SELECT 1 FROM semel_outbox AS older
                                WHERE older.aggregatetype = :to AND older.aggregateid = semel_outbox.aggregateid
                                  AND older.state = 'ready' AND older.seq < semel_outbox.seq)
               AND (lease_until IS NULL OR lease_until <= (SELECT now FROM clock))
             ORDER BY seq
             LIMIT :run)
), ready AS MATERIALIZED (
    SELECT seq, aggregateid, payload
      FROM semel_outbox
     WHERE aggregatetype = :to AND state = 'ready'
       AND (lease_until IS NULL OR lease_until <= (SELECT now FROM clock))
     ORDER BY seq
     LIMIT :limit
), mine AS (
    SELECT seq, payload, 1 AS is_due
      FROM aside
     WHERE aggregateid IS NULL
        OR NOT EXISTS (SELECT 1 FROM semel_outbox AS other
                        WHERE other.aggregatetype = :to AND other.aggregateid = aside.aggregateid
                          AND other.seq < aside.seq
                          AND (other.state = 'waiting' OR other.state = 'behind' OR other.state = 'dead')
                          AND other.seq NOT IN (SELECT seq FROM aside))
     UNION ALL
    SELECT seq, payload, 0
      FROM ready
     WHERE aggregateid IS NULL
        OR (NOT EXISTS (SELECT 1 FROM semel_outbox AS other
                         WHERE other.aggregatetype = :to AND other.aggregateid = ready.aggregateid
                           AND other.seq < ready.seq
                           AND (other.state = 'waiting' OR other.state = 'behind' OR other.state = 'dead'))
            AND NOT EXISTS (SELECT 1 FROM semel_outbox AS other
                             WHERE other.aggregatetype = :to AND other.aggregateid = ready.aggregateid
                               AND other.seq < ready.seq AND other.state = 'ready'
                               AND other.lease_until > (SELECT now FROM clock)))
)
UPDATE semel_outbox
   SET token = :token, lease_until = (SELECT now FROM semel_keys_clock) + :lease
 WHERE seq IN (SELECT seq
                 FROM (SELECT seq, is_due, sum(length(payload)) OVER (ORDER BY is_due DESC, seq) - length(payload) AS before
                         FROM mine)
                WHERE before < :bytes
                ORDER BY is_due DESC, seq
                LIMIT :limit)
RETURNING seq, attempts, id, type, payload, json_array(content_type, aggregateid, headers, traceparent),
          created_at / 1000.0


-- name: walked
-- How many are ready, up to a limit.
SELECT count(*) FROM (SELECT 1 FROM semel_outbox WHERE aggregatetype = :to AND state = 'ready' LIMIT :limit)


-- name: renew
UPDATE semel_outbox
   SET lease_until = (SELECT now FROM semel_keys_clock) + :lease
 WHERE id IN (SELECT value FROM json_each(:ids)) AND token = :token
RETURNING 1


-- name: settle
-- Write back what became of a batch, but for what is deleted: only what this relay still has, by its token.
UPDATE semel_outbox
   SET state = CASE json_extract(asked.value, '$.ending') WHEN 'delivered' THEN 'sent' WHEN 'failed' THEN 'waiting'
                                             WHEN 'dead' THEN 'dead' ELSE state END,
       attempts = attempts + (json_extract(asked.value, '$.ending') = 'failed' OR json_extract(asked.value, '$.ending') = 'dead'),
       due_at = CASE json_extract(asked.value, '$.ending') WHEN 'failed'
                     THEN (SELECT now FROM semel_keys_clock) + CAST(round(1000 * (json_extract(asked.value, '$.pause'))) AS INTEGER)
                     ELSE due_at END,
       ended_at = CASE WHEN json_extract(asked.value, '$.ending') = 'delivered' OR json_extract(asked.value, '$.ending') = 'dead'
                       THEN (SELECT now FROM semel_keys_clock) END,
       error = CASE WHEN json_extract(asked.value, '$.ending') = 'delivered' THEN NULL
                    ELSE coalesce(json_extract(asked.value, '$.error'), error) END,
       token = NULL, lease_until = NULL
  FROM json_each(:asked) AS asked
 WHERE semel_outbox.id = json_extract(asked.value, '$.id') AND token = :token
   AND (json_extract(asked.value, '$.ending') <> 'delivered' OR :keep)
RETURNING id, state, aggregateid


-- name: gone
-- Delete what was delivered.
DELETE FROM semel_outbox
 WHERE id IN (SELECT json_extract(value, '$.id') FROM json_each(:asked) WHERE json_extract(value, '$.ending') = 'delivered') AND token = :token
RETURNING aggregateid


-- name: note
-- Write a line of the audit trail for each of these messages, which are dead now.
INSERT INTO semel_audit (at, scope, key, attempt, event, actor, detail)
SELECT clock.now, 'outbox:' || aggregatetype, id, attempts, 'dead', :actor, error
  FROM semel_outbox, semel_keys_clock AS clock
 WHERE id IN (SELECT value FROM json_each(:ids))
RETURNING 1


-- name: free_keys
-- Of some keys, make due the first message that is behind nothing any more.
UPDATE semel_outbox
   SET state = 'waiting', due_at = (SELECT now FROM semel_keys_clock)
 WHERE state = 'behind'
   AND seq IN (SELECT (SELECT min(other.seq) FROM semel_outbox AS other
                        WHERE other.aggregatetype = :to AND other.aggregateid = asked.value
                          AND (other.state = 'waiting' OR other.state = 'behind' OR other.state = 'dead'))
                 FROM json_each(:keys) AS asked)
   AND NOT EXISTS (SELECT 1 FROM semel_outbox AS other
                    WHERE other.aggregatetype = :to AND other.aggregateid = semel_outbox.aggregateid
                      AND other.state = 'ready' AND other.seq < semel_outbox.seq)
RETURNING 1


-- name: set_aside_keys
-- Some keys that have messages behind others, from the one after :after_key on.
SELECT DISTINCT aggregateid
  FROM semel_outbox
 WHERE aggregatetype = :to AND aggregateid > :after_key
   AND (state = 'waiting' OR state = 'behind' OR state = 'dead') AND aggregateid IS NOT NULL
 ORDER BY aggregateid
 LIMIT :limit


-- name: pending
SELECT asked.value
  FROM json_each(:names) AS asked
 WHERE EXISTS (SELECT 1 FROM semel_outbox WHERE aggregatetype = asked.value AND state = 'ready')
    OR EXISTS (SELECT 1 FROM semel_outbox
                WHERE aggregatetype = asked.value AND state = 'waiting'
                  AND due_at <= (SELECT now FROM semel_keys_clock))


-- name: browse
-- The messages in one state, of one destination or of all, in the order of the index that has them. It walks past at most
-- :walk of its entries: dead letters stand before what is behind them, and those of all destinations in one index.
-- "one" is a destination that the index has in its order.
SELECT id, aggregatetype, aggregateid, type, state, attempts, created_at / 1000.0, due_at / 1000.0, ended_at / 1000.0,
       error, size, coalesce(lease_until > (SELECT now FROM semel_keys_clock), 0)
  FROM (SELECT id, seq, aggregatetype, aggregateid, type, state, attempts, created_at, due_at, ended_at, error,
               length(payload) AS size, lease_until
          FROM semel_outbox
--[ready
         WHERE state = 'ready'
--]
--[waiting
         WHERE state = 'waiting'
--]
--[behind
         WHERE (state = 'waiting' OR state = 'behind' OR state = 'dead') AND aggregateid IS NOT NULL
--]
--[dead
         WHERE state = 'dead' AND (state = 'dead' OR state = 'sent')
--]
--[sent
         WHERE state = 'sent' AND (state = 'dead' OR state = 'sent')
--]
--[one
           AND aggregatetype = :to
--]
--[ready
         ORDER BY aggregatetype, seq
--]
--[waiting
         ORDER BY aggregatetype, due_at
--]
--[behind
         ORDER BY aggregatetype, aggregateid, seq
--]
--[dead
         ORDER BY ended_at DESC
--]
--[sent
         ORDER BY ended_at DESC
--]
         LIMIT :walk)
 WHERE aggregatetype = coalesce(:to, aggregatetype)
--[behind
   AND state = 'behind'
--]
--[ready
 ORDER BY aggregatetype, seq
--]
--[waiting
 ORDER BY aggregatetype, due_at
--]
--[behind
 ORDER BY aggregatetype, aggregateid, seq
--]
--[dead
 ORDER BY ended_at DESC
--]
--[sent
 ORDER BY ended_at DESC
--]
 LIMIT :limit


-- name: lag
-- What waits at each destination, and since when; how many dead letters there are, and how many messages in all; and the
-- time. None is counted beyond :each at a destination, and :cap in all.
WITH RECURSIVE names AS (
    SELECT 0 AS number, (SELECT min(name) FROM (
        SELECT min(aggregatetype) AS name FROM semel_outbox WHERE state = 'ready'
        UNION ALL SELECT min(aggregatetype) FROM semel_outbox WHERE state = 'waiting'
        UNION ALL SELECT min(aggregatetype) FROM semel_outbox
                   WHERE (state = 'waiting' OR state = 'behind' OR state = 'dead') AND aggregateid IS NOT NULL)) AS name
     UNION ALL
    SELECT number + 1, (SELECT min(next) FROM (
        SELECT min(aggregatetype) AS next FROM semel_outbox WHERE state = 'ready' AND aggregatetype > names.name
        UNION ALL SELECT min(aggregatetype) FROM semel_outbox WHERE state = 'waiting' AND aggregatetype > names.name
        UNION ALL SELECT min(aggregatetype) FROM semel_outbox
                   WHERE (state = 'waiting' OR state = 'behind' OR state = 'dead') AND aggregateid IS NOT NULL
                     AND aggregatetype > names.name))
      FROM names
     WHERE name IS NOT NULL AND number < :most
)
SELECT name,
       (SELECT count(*) FROM (SELECT 1 FROM semel_outbox WHERE state = 'ready' AND aggregatetype = name LIMIT :each)),
       (SELECT count(*) FROM (SELECT 1 FROM semel_outbox WHERE state = 'waiting' AND aggregatetype = name LIMIT :each)),
       (SELECT count(*) FROM (SELECT state FROM semel_outbox
                               WHERE (state = 'waiting' OR state = 'behind' OR state = 'dead')
                                 AND aggregateid IS NOT NULL AND aggregatetype = name
                               ORDER BY aggregateid, seq LIMIT :each)
         WHERE state = 'behind'),
       ((SELECT now FROM semel_keys_clock) - (
           SELECT created_at FROM semel_outbox WHERE state = 'ready' AND aggregatetype = name ORDER BY seq LIMIT 1)) / 1000.0,
       (SELECT count(*) FROM (SELECT 1 FROM semel_outbox WHERE state = 'dead' AND (state = 'dead' OR state = 'sent')
                               LIMIT :cap)),
       (SELECT count(*) FROM (SELECT 1 FROM semel_outbox WHERE state = 'ready' LIMIT :cap))
       + (SELECT count(*) FROM (SELECT 1 FROM semel_outbox WHERE state = 'waiting' LIMIT :cap))
       + (SELECT count(*) FROM (SELECT state FROM semel_outbox
                                 WHERE (state = 'waiting' OR state = 'behind' OR state = 'dead')
                                   AND aggregateid IS NOT NULL
                                 ORDER BY aggregatetype, aggregateid, seq LIMIT :cap)
           WHERE state = 'behind'),
       (SELECT now FROM semel_keys_clock) / 1000.0
  FROM names
 ORDER BY number


-- name: look
SELECT id, aggregatetype, aggregateid, type, state, attempts, created_at / 1000.0, due_at / 1000.0, ended_at / 1000.0,
       error, length(payload), coalesce(lease_until > (SELECT now FROM semel_keys_clock), 0), content_type, headers,
       traceparent, payload
  FROM semel_outbox
 WHERE id = :id


-- name: note_change
-- Write a line of the audit trail for each dead letter that an operator is about to requeue or to drop.
INSERT INTO semel_audit (at, scope, key, attempt, event, actor, detail)
SELECT clock.now, 'outbox:' || aggregatetype, id, attempts, :event, :actor, error
  FROM semel_outbox, semel_keys_clock AS clock
 WHERE (state = 'dead' OR (state = 'sent' AND :id IS NOT NULL AND :event = 'requeued'))
   AND (state = 'dead' OR state = 'sent')
   AND (:id IS NULL OR id = :id) AND (:to IS NULL OR aggregatetype = :to)
   AND (:since IS NULL OR ended_at >= clock.now - :since) AND :audit
   AND (:before IS NULL OR ended_at < :before)
   AND (:seen_at IS NULL OR (ended_at / 1000.0 = :seen_at AND attempts = :seen_attempts))
 ORDER BY ended_at
 LIMIT :limit
RETURNING 1


-- name: requeue
UPDATE semel_outbox
   SET state = 'waiting', due_at = (SELECT now FROM semel_keys_clock), attempts = 0, ended_at = NULL
 WHERE seq IN (SELECT seq FROM semel_outbox
                WHERE (state = 'dead' OR (state = 'sent' AND :id IS NOT NULL)) AND (state = 'dead' OR state = 'sent')
                  AND (:id IS NULL OR id = :id) AND (:to IS NULL OR aggregatetype = :to)
                  AND (:since IS NULL OR ended_at >= (SELECT now FROM semel_keys_clock) - :since)
                  AND (:before IS NULL OR ended_at < :before)
                  AND (:seen_at IS NULL OR (ended_at / 1000.0 = :seen_at AND attempts = :seen_attempts))
                ORDER BY ended_at
                LIMIT :limit)
RETURNING 1


-- name: drop
DELETE FROM semel_outbox
 WHERE seq IN (SELECT seq FROM semel_outbox
                WHERE state = 'dead' AND (state = 'dead' OR state = 'sent')
                  AND (:id IS NULL OR id = :id) AND (:to IS NULL OR aggregatetype = :to)
                  AND (:since IS NULL OR ended_at >= (SELECT now FROM semel_keys_clock) - :since)
                  AND (:before IS NULL OR ended_at < :before)
                  AND (:seen_at IS NULL OR (ended_at / 1000.0 = :seen_at AND attempts = :seen_attempts))
                ORDER BY ended_at
                LIMIT :limit)
RETURNING 1


-- name: reap
DELETE FROM semel_outbox
 WHERE seq IN (SELECT seq FROM semel_outbox
                WHERE aggregatetype = :to AND state = 'sent' AND (state = 'dead' OR state = 'sent')
                  AND ended_at < (SELECT now FROM semel_keys_clock) - :older_than
                ORDER BY ended_at
                LIMIT :limit)
RETURNING 1
