-- The statements of the outbox on PostgreSQL. "add" joins the application's transaction, on any driver; the others have
-- one of their own. So casts are spelled CAST, and nothing in them is a percent sign or a stray colon.
--
-- What a claim reads does not grow with the table. It walks the index semel_outbox_ready of one destination from where
-- its relay was last (:after), since index entries of messages that were sent may be there until the next vacuum. A
-- message leaves "ready" once and never comes back, so nothing appears behind that place but what is committed late:
-- the relay moves on only when every transaction has ended that was running when it got there (core/cursor.py).
--
-- Order of a key: a ready message is taken only if no other of its key is set aside (waiting for another try, behind
-- one that is, or dead), and none that is ready and older is left out. Messages of a key that has trouble are set aside
-- as they are met, so that a walk does not meet them again; they are freed, one by one, as those before them end.


-- name: add
-- Write one message. A relay that sleeps holds a lock exclusively; where it can't be had, shared, the relay is woken at
-- COMMIT. While none sleeps, no transaction notifies: one that does waits for a lock of the whole database at COMMIT.
-- The transaction has its number before the message has one: core/cursor.py relies on it. So it is asked for in a
-- subquery of its own (OFFSET 0), and read before the row is made.
-- It fails where a handler of Semel's has changed the search path, and another table is found (postgres/joined.py).
INSERT INTO semel_outbox (id, aggregatetype, aggregateid, type, content_type, headers, traceparent, payload)
SELECT CAST(CAST(:id AS text) AS uuid), CAST(:to AS text), CAST(:key AS text), CAST(:type AS text),
       CAST(:content_type AS text), CAST(:headers AS text), CAST(:traceparent AS text), CAST(:payload AS bytea)
  FROM (SELECT pg_current_xact_id() AS xid OFFSET 0) AS me
 WHERE xid IS NOT NULL
   AND CAST(CASE WHEN current_setting('semel.table', true)
                      NOT IN ('', coalesce(CAST(CAST(to_regclass('semel_keys') AS oid) AS text), 'none'))
                 THEN 'semel: moved' ELSE '1' END AS integer) = 1
    ON CONFLICT (id) DO NOTHING
RETURNING CASE WHEN pg_try_advisory_xact_lock_shared(CAST(:asleep AS bigint)) THEN 0
               ELSE length(CAST(pg_notify(CAST(:channel AS text), 'outbox') AS text)) END


-- name: same
-- Whether the message that has this id is the one that was to be added.
SELECT aggregatetype = CAST(:to AS text) AND aggregateid IS NOT DISTINCT FROM CAST(:key AS text)
       AND type = CAST(:type AS text) AND payload = CAST(:payload AS bytea)
  FROM semel_outbox
 WHERE id = CAST(CAST(:id AS text) AS uuid)


-- name: again
-- Send a message once more that was sent, and kept.
UPDATE semel_outbox
   SET state = 'waiting', due_at = clock_timestamp(), attempts = 0, ended_at = NULL
 WHERE id = CAST(CAST(:id AS text) AS uuid) AND state = 'sent'
RETURNING 1


-- name: claim
-- Take messages of one destination: those that are due again first, then those that are ready, oldest first. Behind one
-- that was freed and has not failed, the "run" of its key is taken, too: up to the first that is ready still, since
-- another relay may have had that when those after it were set aside.
-- "walked" are the next ready ones that no relay has; "mine" those that are free, up to a number of bytes, and locked.
-- The first row of the answer tells where the walk began and ended, and which transactions run; then how many entries of
-- indexes were read, dead ones included, and the time before which nothing waits, with a second for what is committed
-- just now (core/cursor.py). The others are messages.
-- A run of messages of one key is taken together, up to the first that is not "mine". Whether there is an older one is
-- asked from :floor on, below which every message of the queue has ended. That is looked up by key and number, in the
-- order of semel_outbox_order: a planner without statistics would rather walk along all that is ready, by number, for
-- each key. To generate_series() it gives a thousand rows, which would be dear to sort; it makes one.
-- coalesce() keeps the planner from reading a whole index of that state beside the primary key.
-- With :aside, ready messages that can't be taken because of another of their key leave the queue; one that is due and
-- has another of its key before it waits behind that in any case, or it would be found due again and again.
-- = ANY (ARRAY[...]) is looked up for each, and can't be done by reading the whole table.
WITH clock AS MATERIALIZED (
    SELECT clock_timestamp() AS now, coalesce(sum(pg_stat_get_xact_tuples_returned(indexrelid)), 0) AS entries
      FROM pg_catalog.pg_index
     WHERE indrelid = CAST('semel_outbox' AS regclass)
), due AS MATERIALIZED (
    SELECT id, seq, aggregateid, attempts, octet_length(payload) AS size, 1 AS once
      FROM semel_outbox
     WHERE aggregatetype = CAST(:to AS text) AND state = 'waiting' AND due_at <= (SELECT now FROM clock)
       AND due_at >= to_timestamp(CAST(:due_from AS double precision))
       AND (lease_until IS NULL OR lease_until <= (SELECT now FROM clock))
     ORDER BY due_at
     LIMIT CAST(:due AS bigint)
       FOR UPDATE SKIP LOCKED
), run AS MATERIALIZED (
    SELECT run.id, run.seq, run.aggregateid, octet_length(run.payload) AS size
      FROM semel_outbox AS run
     WHERE run.id = ANY (ARRAY(
            SELECT next.id
              FROM due
             CROSS JOIN LATERAL (
                SELECT id
                  FROM semel_outbox AS aside
                 WHERE aside.aggregatetype = CAST(:to AS text) AND aside.aggregateid = due.aggregateid
                   AND aside.state IN ('waiting', 'behind', 'dead') AND aside.state = 'behind' AND aside.seq > due.seq
                   AND aside.seq < coalesce((
                        SELECT older.seq
                          FROM semel_outbox AS older
                         CROSS JOIN generate_series(1, due.once)
                         WHERE older.aggregatetype = CAST(:to AS text) AND older.state = 'ready'
                           AND older.aggregateid IS NOT NULL
                           AND (older.aggregateid, older.seq)
                               > (due.aggregateid, greatest(due.seq, CAST(:floor AS bigint)))
                           AND (older.aggregateid, older.seq) < (due.aggregateid, 9223372036854775807)
                         ORDER BY older.aggregateid, older.seq
                         LIMIT 1), 9223372036854775807)
                 ORDER BY seq
                 LIMIT CAST(:run AS bigint)
             ) AS next
             WHERE due.attempts = 0))
       AND coalesce(run.state, '') = 'behind' AND (run.lease_until IS NULL OR run.lease_until <= (SELECT now FROM clock))
       FOR UPDATE SKIP LOCKED
), walked AS MATERIALIZED (
    SELECT id, seq
      FROM semel_outbox
     WHERE aggregatetype = CAST(:to AS text) AND state = 'ready' AND seq > CAST(:after AS bigint)
       AND (lease_until IS NULL OR lease_until <= (SELECT now FROM clock))
     ORDER BY seq
     LIMIT CAST(:limit AS bigint)
), free AS MATERIALIZED (
    SELECT free.id, free.seq, free.aggregateid, octet_length(free.payload) AS size
      FROM semel_outbox AS free
     WHERE free.id = ANY (ARRAY(SELECT id FROM walked))
       AND coalesce(free.state, '') = 'ready' AND (free.lease_until IS NULL OR free.lease_until <= (SELECT now FROM clock))
       FOR UPDATE SKIP LOCKED
), mine AS MATERIALIZED (
    SELECT id, seq, aggregateid, is_due, sum(size) OVER (ORDER BY NOT is_due, seq) - size AS before
      FROM (SELECT id, seq, aggregateid, size, true AS is_due FROM due
             UNION ALL
            SELECT id, seq, aggregateid, size, true FROM run
             UNION ALL
            SELECT id, seq, aggregateid, size, false FROM free) AS mine
), heads AS MATERIALIZED (
    SELECT aggregateid,
           (SELECT other.seq
              FROM semel_outbox AS other
             CROSS JOIN generate_series(1, asked.once)
             WHERE other.aggregatetype = CAST(:to AS text) AND other.state = 'ready' AND other.aggregateid IS NOT NULL
               AND (other.aggregateid, other.seq) > (asked.aggregateid, CAST(:floor AS bigint))
               AND (other.aggregateid, other.seq) < (asked.aggregateid, asked.last)
               AND other.id <> ALL (ARRAY(SELECT id FROM mine WHERE before < CAST(:bytes AS bigint)
                                             AND mine.aggregateid = asked.aggregateid))
             ORDER BY other.aggregateid, other.seq
             LIMIT 1) AS ready,
           (SELECT other.seq
              FROM semel_outbox AS other
             WHERE other.aggregatetype = CAST(:to AS text) AND other.aggregateid = asked.aggregateid
               AND other.state IN ('waiting', 'behind', 'dead')
               AND other.id <> ALL (ARRAY(SELECT id FROM mine WHERE is_due AND mine.aggregateid = asked.aggregateid))
             ORDER BY other.seq
             LIMIT 1) AS aside,
           (SELECT min(due.seq) FROM due WHERE due.aggregateid = asked.aggregateid) AS due
      FROM (SELECT aggregateid, max(seq) FILTER (WHERE NOT is_due) AS last, 1 AS once
              FROM mine
             WHERE aggregateid IS NOT NULL
             GROUP BY aggregateid) AS asked
), judged AS MATERIALIZED (
    SELECT mine.id, mine.seq, mine.is_due,
           before < CAST(:bytes AS bigint)
           AND (mine.aggregateid IS NULL
                OR ((aside IS NULL OR mine.seq < aside)
                    AND (mine.is_due OR ((due IS NULL OR mine.seq < due) AND (ready IS NULL OR mine.seq < ready))))
               ) AS is_taken,
           mine.aggregateid IS NOT NULL
           AND (aside < mine.seq
                OR (NOT mine.is_due AND CAST(:aside AS boolean) AND (due < mine.seq OR ready < mine.seq))) IS TRUE
           AND (mine.is_due OR CAST(:aside AS boolean)) AS is_behind
      FROM mine
      LEFT JOIN heads ON heads.aggregateid = mine.aggregateid
), set_aside AS (
    UPDATE semel_outbox
       SET state = 'behind', token = NULL, lease_until = NULL
      FROM judged
     WHERE semel_outbox.id = ANY (ARRAY[judged.id]) AND is_behind AND coalesce(state, '') <> 'behind'
 RETURNING 1
), taken AS (
    UPDATE semel_outbox
       SET token = CAST(:token AS bytea),
           lease_until = clock_timestamp() + CAST(:lease AS double precision) * interval '1 second'
      FROM judged
     WHERE semel_outbox.id = ANY (ARRAY[judged.id]) AND is_taken
 RETURNING semel_outbox.id, semel_outbox.seq, type, payload, content_type, aggregateid, headers, traceparent,
           created_at, attempts
)
SELECT (SELECT seq FROM semel_outbox
         WHERE aggregatetype = CAST(:to AS text) AND state = 'ready' AND seq > CAST(:after AS bigint)
         ORDER BY seq
         LIMIT 1), (SELECT max(seq) FROM walked), (SELECT count(*) FROM walked),
       CAST(CAST(pg_snapshot_xmin(pg_current_snapshot()) AS text) AS bigint),
       CAST(CAST(pg_snapshot_xmax(pg_current_snapshot()) AS text) AS bigint),
       (SELECT count(*) FROM set_aside),
       CAST((SELECT sum(pg_stat_get_xact_tuples_returned(indexrelid)) FROM pg_catalog.pg_index
              WHERE indrelid = CAST('semel_outbox' AS regclass)) - (SELECT entries FROM clock) AS text),
       NULL, NULL, NULL,
       least((SELECT date_part('epoch', due_at) FROM semel_outbox
               WHERE aggregatetype = CAST(:to AS text) AND state = 'waiting'
                 AND due_at >= to_timestamp(CAST(:due_from AS double precision))
               ORDER BY due_at
               LIMIT 1), date_part('epoch', (SELECT now FROM clock))) - 1
 UNION ALL
(SELECT NULL, seq, NULL, NULL, NULL, attempts, CAST(id AS text), type, payload,
        CAST(json_build_array(content_type, aggregateid, headers, traceparent) AS text), date_part('epoch', created_at)
   FROM taken
  ORDER BY seq)


-- name: renew
-- Prolong the lease of what a relay still has; how many that are.
WITH renewed AS (
    UPDATE semel_outbox
       SET lease_until = clock_timestamp() + CAST(:lease AS double precision) * interval '1 second'
     WHERE id = ANY (CAST(CAST(:ids AS text[]) AS uuid[])) AND token = CAST(:token AS bytea)
 RETURNING 1
)
SELECT count(*) FROM renewed


-- name: settle
-- Write back what became of a batch: only what this relay still has, by its token. Of each key that has made progress,
-- the first that is behind becomes due.
-- What was handed back stays as it was, and is free for any relay. The answer is how many messages were still held, and
-- which of them are dead. An older one of its key is looked up as "claim" does.
-- coalesce() hides from a planner how rare a token is: where it knows of none, it would rather look for that in the whole
-- table than for each message by its id.
WITH asked AS MATERIALIZED (
    SELECT *
      FROM unnest(CAST(CAST(:ids AS text[]) AS uuid[]), CAST(:ends AS text[]), CAST(:pauses AS double precision[]),
                  CAST(:errors AS text[])) AS asked (id, ending, pause, error)
), gone AS (
    DELETE FROM semel_outbox
     USING asked
     WHERE semel_outbox.id = ANY (ARRAY[asked.id]) AND coalesce(token = CAST(:token AS bytea), false)
       AND ending = 'delivered' AND NOT CAST(:keep AS boolean)
 RETURNING aggregateid
), kept AS (
    UPDATE semel_outbox
       SET state = CASE ending WHEN 'delivered' THEN 'sent' WHEN 'failed' THEN 'waiting' WHEN 'dead' THEN 'dead'
                               ELSE state END,
           attempts = attempts + CASE WHEN ending IN ('failed', 'dead') THEN 1 ELSE 0 END,
           due_at = CASE ending WHEN 'failed' THEN clock_timestamp() + pause * interval '1 second' ELSE due_at END,
           ended_at = CASE WHEN ending IN ('delivered', 'dead') THEN clock_timestamp() END,
           error = CASE WHEN ending = 'delivered' THEN NULL ELSE coalesce(asked.error, semel_outbox.error) END,
           token = NULL, lease_until = NULL
      FROM asked
     WHERE semel_outbox.id = ANY (ARRAY[asked.id]) AND coalesce(token = CAST(:token AS bytea), false)
       AND (ending <> 'delivered' OR CAST(:keep AS boolean))
 RETURNING semel_outbox.id, aggregateid, aggregatetype, attempts, state
), noted AS (
    INSERT INTO semel_audit (at, scope, key, attempt, event, actor, detail)
    SELECT clock_timestamp(), 'outbox:' || aggregatetype, CAST(kept.id AS text), attempts, 'dead', CAST(:actor AS text),
           asked.error
      FROM kept
      JOIN asked ON asked.id = kept.id
     WHERE kept.state = 'dead' AND CAST(:audit AS boolean)
), progressed AS MATERIALIZED (
    SELECT DISTINCT aggregateid
      FROM (SELECT aggregateid FROM gone UNION ALL SELECT aggregateid FROM kept WHERE state = 'sent') AS progressed
     WHERE aggregateid IS NOT NULL
       AND aggregateid <> ALL (ARRAY(SELECT aggregateid FROM kept WHERE aggregateid IS NOT NULL AND state <> 'sent'))
), freed AS (
    UPDATE semel_outbox
       SET state = 'waiting', due_at = clock_timestamp()
     WHERE id = ANY (ARRAY(
            SELECT next.id
              FROM progressed
             CROSS JOIN LATERAL (
                SELECT id, state, seq, 1 AS once
                  FROM semel_outbox AS aside
                 WHERE aside.aggregatetype = CAST(:to AS text) AND aside.aggregateid = progressed.aggregateid
                   AND aside.state IN ('waiting', 'behind', 'dead')
                   AND aside.id <> ALL (ARRAY(SELECT id FROM asked WHERE ending = 'delivered'))
                 ORDER BY seq
                 LIMIT 1
             ) AS next
             WHERE next.state = 'behind'
               AND (SELECT older.seq
                      FROM semel_outbox AS older
                     CROSS JOIN generate_series(1, next.once)
                     WHERE older.aggregatetype = CAST(:to AS text) AND older.state = 'ready'
                       AND older.aggregateid IS NOT NULL
                       AND (older.aggregateid, older.seq) > (progressed.aggregateid, 0)
                       AND (older.aggregateid, older.seq) < (progressed.aggregateid, next.seq)
                       AND older.id <> ALL (ARRAY(SELECT id FROM asked WHERE ending = 'delivered'))
                     ORDER BY older.aggregateid, older.seq
                     LIMIT 1) IS NULL))
       AND coalesce(state, '') = 'behind'
 RETURNING 1
)
SELECT (SELECT count(*) FROM gone) + (SELECT count(*) FROM kept), (SELECT count(*) FROM freed)


-- name: free
-- Make due the messages that are behind nothing any more: the one before them may have ended just as they were set aside.
-- It looks at some keys at a time, from the one after :after_key on.
WITH keys AS MATERIALIZED (
    SELECT DISTINCT aggregateid
      FROM (SELECT aggregateid
              FROM semel_outbox
             WHERE aggregatetype = CAST(:to AS text) AND aggregateid > CAST(:after_key AS text)
               AND state IN ('waiting', 'behind', 'dead')
             ORDER BY aggregateid, seq
             LIMIT CAST(:limit AS bigint)) AS listed
), heads AS MATERIALIZED (
    SELECT keys.aggregateid, head.id, head.seq, head.state, head.once
      FROM keys
     CROSS JOIN LATERAL (
        SELECT id, seq, state, 1 AS once
          FROM semel_outbox AS head
         WHERE head.aggregatetype = CAST(:to AS text) AND head.aggregateid = keys.aggregateid
           AND head.state IN ('waiting', 'behind', 'dead')
         ORDER BY seq
         LIMIT 1
     ) AS head
), freed AS (
    UPDATE semel_outbox
       SET state = 'waiting', due_at = clock_timestamp()
     WHERE id = ANY (ARRAY(
            SELECT heads.id
              FROM heads
             WHERE heads.state = 'behind'
               AND (SELECT older.seq
                      FROM semel_outbox AS older
                     CROSS JOIN generate_series(1, heads.once)
                     WHERE older.aggregatetype = CAST(:to AS text) AND older.state = 'ready'
                       AND older.aggregateid IS NOT NULL
                       AND (older.aggregateid, older.seq) > (heads.aggregateid, 0)
                       AND (older.aggregateid, older.seq) < (heads.aggregateid, heads.seq)
                     ORDER BY older.aggregateid, older.seq
                     LIMIT 1) IS NULL))
       AND coalesce(state, '') = 'behind'
 RETURNING 1
)
SELECT (SELECT max(aggregateid) FROM keys), (SELECT count(*) FROM freed)


-- name: pending
-- Those of some destinations that have something to be sent now. The time is asked in a subquery, as "reap" does.
SELECT asked.name
  FROM unnest(CAST(:names AS text[]), CAST(:after AS bigint[])) AS asked (name, after)
 WHERE EXISTS (SELECT FROM semel_outbox
                WHERE aggregatetype = asked.name AND state = 'ready' AND seq > asked.after)
    OR EXISTS (SELECT FROM semel_outbox
                WHERE aggregatetype = asked.name AND state = 'waiting' AND due_at <= (SELECT clock_timestamp()))


-- name: browse
-- The messages in one state, of one destination or of all, in the order of the index that has them. It walks past at most
-- :walk of its entries: dead letters stand before what is behind them, and those of all destinations in one index.
-- "one" is a destination that the index has in its order.
SELECT CAST(id AS text), aggregatetype, aggregateid, type, state, attempts, date_part('epoch', created_at),
       date_part('epoch', due_at), date_part('epoch', ended_at), error, size,
       CASE WHEN lease_until > clock_timestamp() THEN true ELSE false END
  FROM (SELECT id, seq, aggregatetype, aggregateid, type, state, attempts, created_at, due_at, ended_at, error,
               octet_length(payload) AS size, lease_until
          FROM semel_outbox
--[ready
         WHERE state = 'ready'
--]
--[waiting
         WHERE state = 'waiting'
--]
--[behind
         WHERE state IN ('waiting', 'behind', 'dead') AND aggregateid IS NOT NULL
--]
--[dead
         WHERE state = 'dead'
--]
--[sent
         WHERE state = 'sent'
--]
--[one
           AND aggregatetype = CAST(:to AS text)
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
         LIMIT CAST(:walk AS bigint)) AS walked
 WHERE aggregatetype = coalesce(CAST(:to AS text), aggregatetype)
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
 LIMIT CAST(:limit AS bigint)


-- name: lag
-- What waits at each destination, and since when; how many dead letters there are; and the time. It hops from one
-- destination to the next along the indexes, and walks past no more than :each entries there, and :cap for the sums. Those that are behind
-- others, those others, and dead letters that have a key are in one index: a destination may have dead letters only.
WITH RECURSIVE destinations AS (
    SELECT 0 AS number,
           least((SELECT min(aggregatetype) FROM semel_outbox WHERE state = 'ready'),
                 (SELECT min(aggregatetype) FROM semel_outbox WHERE state = 'waiting'),
                 (SELECT min(aggregatetype) FROM semel_outbox
                   WHERE state IN ('waiting', 'behind', 'dead') AND aggregateid IS NOT NULL)) AS name
     UNION ALL
    SELECT number + 1,
           least((SELECT min(aggregatetype) FROM semel_outbox WHERE state = 'ready' AND aggregatetype > name),
                 (SELECT min(aggregatetype) FROM semel_outbox WHERE state = 'waiting' AND aggregatetype > name),
                 (SELECT min(aggregatetype) FROM semel_outbox
                   WHERE state IN ('waiting', 'behind', 'dead') AND aggregateid IS NOT NULL AND aggregatetype > name))
      FROM destinations
     WHERE name IS NOT NULL AND number < CAST(:most AS integer)
)
SELECT name,
       (SELECT count(*) FROM (SELECT 1 FROM semel_outbox WHERE state = 'ready' AND aggregatetype = name
                               ORDER BY seq LIMIT CAST(:each AS bigint)) AS counted),
       (SELECT count(*) FROM (SELECT 1 FROM semel_outbox WHERE state = 'waiting' AND aggregatetype = name
                               ORDER BY due_at LIMIT CAST(:each AS bigint)) AS counted),
       (SELECT count(*) FROM (SELECT state FROM semel_outbox
                               WHERE state IN ('waiting', 'behind', 'dead') AND aggregateid IS NOT NULL
                                 AND aggregatetype = name
                               ORDER BY aggregateid, seq LIMIT CAST(:each AS bigint)) AS aside
         WHERE state = 'behind'),
       date_part('epoch', clock_timestamp() - (
           SELECT created_at FROM semel_outbox WHERE state = 'ready' AND aggregatetype = name ORDER BY seq LIMIT 1)),
       (SELECT count(*) FROM (SELECT 1 FROM semel_outbox WHERE state = 'dead'
                               ORDER BY ended_at LIMIT CAST(:cap AS bigint)) AS counted),
       (SELECT count(*)
          FROM (SELECT 1 FROM (SELECT 1 FROM semel_outbox WHERE state = 'ready'
                                ORDER BY aggregatetype, seq LIMIT CAST(:cap AS bigint)) AS ready
                 UNION ALL
                SELECT 1 FROM (SELECT 1 FROM semel_outbox WHERE state = 'waiting'
                                ORDER BY aggregatetype, due_at LIMIT CAST(:cap AS bigint)) AS waiting
                 UNION ALL
                SELECT 1 FROM (SELECT state FROM semel_outbox
                                WHERE state IN ('waiting', 'behind', 'dead') AND aggregateid IS NOT NULL
                                ORDER BY aggregatetype, aggregateid, seq LIMIT CAST(:cap AS bigint)) AS aside
                 WHERE state = 'behind') AS unsent),
       date_part('epoch', clock_timestamp())
  FROM destinations
 ORDER BY number


-- name: look
-- Everything about one message.
SELECT CAST(id AS text), aggregatetype, aggregateid, type, state, attempts, date_part('epoch', created_at),
       date_part('epoch', due_at), date_part('epoch', ended_at), error, octet_length(payload),
       CASE WHEN lease_until > clock_timestamp() THEN true ELSE false END, content_type, headers, traceparent, payload
  FROM semel_outbox
 WHERE id = CAST(CAST(:id AS text) AS uuid)


-- name: requeue
-- Give dead letters another series of tries, by id, by destination or by when they died. By its id, one that was sent and
-- kept is sent again. With :seen_at, only one that ended then, after as many tries: what was seen is still so.
WITH found AS (
    SELECT id FROM semel_outbox
     WHERE (state = 'dead' OR (state = 'sent' AND CAST(:id AS text) IS NOT NULL)) AND state IN ('dead', 'sent')
       AND (CAST(:id AS text) IS NULL OR id = CAST(CAST(:id AS text) AS uuid))
       AND (CAST(:to AS text) IS NULL OR aggregatetype = CAST(:to AS text))
       AND (CAST(:since AS double precision) IS NULL
            OR ended_at >= clock_timestamp() - CAST(:since AS double precision) * interval '1 second')
       AND (CAST(:before AS double precision) IS NULL OR ended_at < to_timestamp(CAST(:before AS double precision)))
       AND (CAST(:seen_at AS double precision) IS NULL
            OR (date_part('epoch', ended_at) = CAST(:seen_at AS double precision)
                AND attempts = CAST(:seen_attempts AS integer)))
     ORDER BY ended_at
     LIMIT CAST(:limit AS bigint)
       FOR UPDATE SKIP LOCKED
), changed AS (
    UPDATE semel_outbox
       SET state = 'waiting', due_at = clock_timestamp(), attempts = 0, ended_at = NULL
      FROM found
     WHERE semel_outbox.id = found.id
 RETURNING semel_outbox.id, aggregatetype, error
), noted AS (
    INSERT INTO semel_audit (at, scope, key, attempt, event, actor, detail)
    SELECT clock_timestamp(), 'outbox:' || aggregatetype, CAST(id AS text), 0, 'requeued', CAST(:actor AS text), error
      FROM changed
     WHERE CAST(:audit AS boolean)
)
SELECT count(*) FROM changed


-- name: drop
-- Delete dead letters, by id, by destination or by when they died. What is behind them is freed by the next relay.
WITH found AS (
    SELECT id FROM semel_outbox
     WHERE state = 'dead'
       AND (CAST(:id AS text) IS NULL OR id = CAST(CAST(:id AS text) AS uuid))
       AND (CAST(:to AS text) IS NULL OR aggregatetype = CAST(:to AS text))
       AND (CAST(:since AS double precision) IS NULL
            OR ended_at >= clock_timestamp() - CAST(:since AS double precision) * interval '1 second')
       AND (CAST(:before AS double precision) IS NULL OR ended_at < to_timestamp(CAST(:before AS double precision)))
       AND (CAST(:seen_at AS double precision) IS NULL
            OR (date_part('epoch', ended_at) = CAST(:seen_at AS double precision)
                AND attempts = CAST(:seen_attempts AS integer)))
     ORDER BY ended_at
     LIMIT CAST(:limit AS bigint)
       FOR UPDATE SKIP LOCKED
), changed AS (
    DELETE FROM semel_outbox USING found WHERE semel_outbox.id = found.id
 RETURNING semel_outbox.id, aggregatetype, type, error
), noted AS (
    INSERT INTO semel_audit (at, scope, key, attempt, event, actor, detail)
    SELECT clock_timestamp(), 'outbox:' || aggregatetype, CAST(id AS text), 0, 'dropped', CAST(:actor AS text), type
      FROM changed
     WHERE CAST(:audit AS boolean)
)
SELECT count(*) FROM changed


-- name: reap
-- Delete messages that were kept after they were sent, once they are old: those that ended from :after on, which is where
-- the last time ended, so that dead entries of an index are not read again. It returns how many, and where it ended.
-- The time is asked in a subquery: a volatile function can't be looked up in an index, and all that were sent since would
-- be read.
WITH clock AS MATERIALIZED (
    SELECT clock_timestamp() - CAST(:older_than AS double precision) * interval '1 second' AS old
), gone AS (
    DELETE FROM semel_outbox
     WHERE id = ANY (ARRAY(
            SELECT id FROM semel_outbox
             WHERE aggregatetype = CAST(:to AS text) AND state = 'sent' AND state IN ('dead', 'sent')
               AND ended_at >= to_timestamp(CAST(:after AS double precision)) AND ended_at < (SELECT old FROM clock)
             ORDER BY ended_at
             LIMIT CAST(:limit AS bigint)))
 RETURNING ended_at
)
SELECT count(*),
       date_part('epoch', CASE WHEN count(*) < CAST(:limit AS bigint) THEN (SELECT old FROM clock) ELSE max(ended_at) END)
  FROM gone
