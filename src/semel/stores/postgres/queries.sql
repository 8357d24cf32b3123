-- The statements of the PostgreSQL store. Each is one round trip and its own transaction, but for those that join the
-- application's: lock, peek, begin, probe, finish, replace and save. They run on any driver, so their casts are spelled
-- CAST and nothing in them is a percent sign or a stray colon.
-- Only the server's clock decides, and it is clock_timestamp(): now() stands still within a transaction.
-- Plural parameters are arrays: one statement serves everybody who asked meanwhile.
-- What is about one record finds it by its primary key. No index names a column that completion changes (state, lease,
-- answer), so that completion is a heap-only update: no index entry is written, and none is left behind dead.
-- Where a statement joins many keys to the table, it says scope = ANY (ARRAY[asked.scope]): that is looked up for each
-- key, and can't be done by walking along the whole primary key, which a plan that was made for a small table does for
-- as long as the session keeps the plan.
-- A body of the partitioned layout may be in another table: whatever reads one says coalesce(body, semel_answer(...)),
-- which is called only where the row says so. Whatever clears a body clears answer_day.
-- Lines between --[ and --] are a part with a name, and are there only in the variants that ask for it (statement.py).
-- What is extraordinary writes a line of the audit trail in the same statement; :audit says whether there is a trail. The
-- ordinary (claimed, accepted, completed, failed, and a line for each record that was reaped) is told by the record, and
-- is written down only where everything is asked for: the part "trail" and :everything.
--
-- A worker's process may hold a lock while it lives, exclusively, in a session of its own; the records that it works on
-- bear the lock's number as their owner. A process that gets that lock, shared, has proof that the process is dead, and need
-- not wait for the lease. It is tried only where the lease is not over, and only by those who hold such a lock
-- themselves (:tests_owner); shared, so that several may find out at once; until the transaction ends, which frees it.
-- What is claimed bears the number of the claimant's own lock, :owner, only if that can't be had: then it is held, and
-- on this very server. A claim must not bear the number of a lock that was lost, or is another server's.
--
-- pg_notify stands in a CASE of its own: a transaction that notifies waits for a lock of the whole database at
-- COMMIT, so none does unless it was asked for.


-- name: claim
-- Take the keys that are free; say of the others what is there.
-- The claims of one statement share the terms of their policy, which are scalars. Scopes and request lines are
-- arrays only where there is more than one of them: unnest() pads an array that is NULL.
-- DO NOTHING, not DO UPDATE: a replay then writes no row version and no WAL.
-- The keys come sorted, because two processes that insert the same keys in different orders deadlock; MATERIALIZED keeps
-- the order.
-- The first row has the tokens that won, one after the other, 16 bytes each. The others are what was found, by its place
-- among the keys that were asked for. They are looked for only where not all have won.
-- The read sees the table as it was before the insert. So a key that a rival took in between comes back
-- in neither part, and its caller asks again.
-- OFFSET 0 makes the planner look each key up by itself, through the primary key.
-- The part "kept" is for claims with a request that is kept, or a key that tells when it was made. Such a key needs no
-- tombstone: by its age it is refused. But only one that was made before now by this clock; its client's may be ahead.
WITH asked AS MATERIALIZED (
    SELECT coalesce(asked.scope, :scope::text) AS scope, key, token, fingerprint,
           coalesce(asked.request_line, :request_line::text) AS request_line, traceparent, place
--[kept
         , request, request_body, made_at
--]
      FROM unnest(:scopes::text[], :keys::text[], :tokens::bytea[], :fingerprints::bytea[], :request_lines::text[],
                  :traceparents::text[]
--[kept
                , :requests::text[], :request_bodies::bytea[], :made_ats::float8[]
--]
           ) WITH ORDINALITY AS asked (scope, key, token, fingerprint, request_line, traceparent
--[kept
                                     , request, request_body, made_at
--]
                                     , place)
), won AS (
    INSERT INTO semel_keys (scope, key, state, attempt, token, fingerprint, request_line, created_at, lease_expires_at,
                            expires_at, on_crash, after_retention, owner, traceparent
--[kept
                          , request, request_body, accepted, upkeep
--]
                           )
    SELECT scope, key,
--[plain
           'processing', 1, token, fingerprint, request_line, clock_timestamp(),
           clock_timestamp() + :lease::float8 * interval '1 second',
           clock_timestamp() + :retention::float8 * interval '1 second', :on_crash::text, :after_retention::text,
           (SELECT :owner::bigint WHERE NOT pg_try_advisory_xact_lock_shared(:owner::bigint)), traceparent
--]
--[kept
           CASE WHEN :accepted::boolean THEN 'pending' ELSE 'processing' END, 1, token, fingerprint, request_line,
           clock_timestamp(),
           CASE WHEN NOT :accepted::boolean THEN clock_timestamp() + :lease::float8 * interval '1 second' END,
           clock_timestamp() + :retention::float8 * interval '1 second', :on_crash::text,
           CASE WHEN :after_retention::text = 'strip' AND to_timestamp(made_at) <= clock_timestamp() THEN 'delete'
                ELSE :after_retention::text END,
           (SELECT :owner::bigint
             WHERE NOT :accepted::boolean AND NOT pg_try_advisory_xact_lock_shared(:owner::bigint)),
           traceparent, request, request_body, :accepted::boolean, CASE WHEN :accepted::boolean THEN 'open' END
--]
      FROM asked
        ON CONFLICT (scope, key) DO NOTHING
 RETURNING token
--[trail
         , scope, key, accepted
), noted AS (
    INSERT INTO semel_audit (at, scope, key, attempt, event, actor)
    SELECT clock_timestamp(), scope, key, 1, CASE WHEN accepted THEN 'accepted' ELSE 'claimed' END, :actor::text
      FROM won
--]
)
SELECT 0::bigint AS place, NULL AS state, 1 AS attempt, string_agg(token, '') AS token, NULL::bytea AS fingerprint,
       NULL::smallint AS status, NULL AS headers, NULL::bytea AS body, false AS lease_is_over,
       0::float8 AS retention_left, NULL AS steps, false AS accepted, NULL AS traceparent
  FROM won
--[kept
HAVING CASE WHEN :accepted::boolean AND count(*) > 0 THEN pg_notify(:channel, 'accepted') IS NOT NULL ELSE true END
--]
 UNION ALL
SELECT asked.place, found.*
  FROM asked
 CROSS JOIN LATERAL (
    SELECT state, attempt, token, fingerprint, status, headers, coalesce(body, semel_answer(answer_day, token)),
           CASE WHEN lease_expires_at IS NULL OR lease_expires_at <= clock_timestamp() THEN true
                WHEN owner IS NOT NULL AND :tests_owner::boolean THEN pg_try_advisory_xact_lock_shared(owner)
                ELSE false END,
           date_part('epoch', expires_at - clock_timestamp()), steps, accepted, traceparent
      FROM semel_keys
     WHERE semel_keys.scope = asked.scope AND semel_keys.key = asked.key
    OFFSET 0
 ) AS found
 WHERE (SELECT count(*) FROM won) < cardinality(:keys::text[])


-- name: claim_one
-- The same for one key, which a request asks for while no other does: without the arrays it costs two thirds. The row of
-- a key that was won has place 0; without a row, a rival took the key in between.
WITH won AS (
    INSERT INTO semel_keys (scope, key, state, attempt, token, fingerprint, request_line, created_at, lease_expires_at,
                            expires_at, on_crash, after_retention, owner, traceparent)
    VALUES (:scope::text, :key::text, 'processing', 1, :token::bytea, :fingerprint::bytea, :request_line::text,
            clock_timestamp(), clock_timestamp() + :lease::float8 * interval '1 second',
            clock_timestamp() + :retention::float8 * interval '1 second', :on_crash::text, :after_retention::text,
            (SELECT :owner::bigint WHERE NOT pg_try_advisory_xact_lock_shared(:owner::bigint)), :traceparent::text)
        ON CONFLICT (scope, key) DO NOTHING
 RETURNING attempt
)
SELECT 0 AS place, NULL AS state, attempt, NULL::bytea AS token, NULL::bytea AS fingerprint, NULL::smallint AS status,
       NULL AS headers, NULL::bytea AS body, false AS lease_is_over, 0::float8 AS retention_left, NULL AS steps,
       false AS accepted, NULL AS traceparent
  FROM won
 UNION ALL
SELECT 1, state, attempt, token, fingerprint, status, headers, coalesce(body, semel_answer(answer_day, token)),
       CASE WHEN lease_expires_at IS NULL OR lease_expires_at <= clock_timestamp() THEN true
            WHEN owner IS NOT NULL AND :tests_owner::boolean THEN pg_try_advisory_xact_lock_shared(owner)
            ELSE false END,
       date_part('epoch', expires_at - clock_timestamp()), steps, accepted, traceparent
  FROM semel_keys
 WHERE scope = :scope::text AND key = :key::text AND NOT EXISTS (SELECT FROM won)


-- name: take_over
-- Take the key from a worker with a lease that ran out, or from a record that expired, if it is still the one that was seen.
-- A record that expired starts anew, but not under its own token: by number and token, the new one could not be told from
-- the old one, which another may have seen. One that did not stays the same operation: it keeps its age, its fingerprint,
-- its steps and its request. One that is pending is begun, by a worker alone, and that is its first attempt still.
-- What is unknown never expires: an operator has to say what it did.
-- The trail tells what was taken over. What is accepted, or begun by its first worker, is ordinary.
WITH taken AS (
    UPDATE semel_keys
       SET state            = CASE WHEN expires_at <= clock.now AND :accepted::boolean THEN 'pending'
                                   ELSE 'processing' END,
           attempt          = CASE WHEN expires_at <= clock.now THEN 1
                                   WHEN state = 'pending' THEN attempt ELSE attempt + 1 END,
           token            = :token,
           lease_expires_at = CASE WHEN expires_at <= clock.now AND :accepted::boolean THEN NULL
                                   ELSE clock.now + :lease * interval '1 second' END,
           owner            = CASE WHEN NOT (expires_at <= clock.now AND :accepted::boolean)
                                   THEN (SELECT :owner::bigint
                                          WHERE NOT pg_try_advisory_xact_lock_shared(:owner::bigint)) END,
           accepted         = CASE WHEN expires_at <= clock.now THEN :accepted::boolean ELSE accepted END,
           milestone        = CASE WHEN expires_at <= clock.now THEN NULL ELSE milestone END,
           status           = NULL,
           headers          = NULL,
           body             = NULL,
           answer_day       = NULL,
           completed_at     = NULL,
           steps            = CASE WHEN expires_at <= clock.now THEN NULL ELSE steps END,
           recovery_point   = CASE WHEN expires_at <= clock.now THEN NULL ELSE recovery_point END,
           fingerprint      = CASE WHEN expires_at <= clock.now THEN :fingerprint ELSE fingerprint END,
           on_crash         = CASE WHEN expires_at <= clock.now THEN :on_crash ELSE on_crash END,
           after_retention  = CASE WHEN expires_at > clock.now THEN after_retention
                                   WHEN :after_retention::text = 'strip'
                                        AND to_timestamp(:made_at::float8) <= clock.now THEN 'delete'
                                   ELSE :after_retention END,
           request          = CASE WHEN expires_at <= clock.now THEN :request ELSE request END,
           request_body     = CASE WHEN expires_at <= clock.now THEN :request_body ELSE request_body END,
           request_line     = CASE WHEN expires_at <= clock.now THEN :request_line ELSE request_line END,
           traceparent      = CASE WHEN expires_at <= clock.now THEN :traceparent::text
                                   ELSE coalesce(:traceparent::text, traceparent) END,
           upkeep           = CASE WHEN expires_at > clock.now THEN upkeep
                                   WHEN :accepted::boolean THEN 'open' END,
           tries            = CASE WHEN expires_at <= clock.now THEN 0
                                   WHEN :is_abandoned::boolean THEN tries + 1 ELSE tries END,
           created_at       = CASE WHEN expires_at <= clock.now THEN clock.now ELSE created_at END,
           expires_at       = CASE WHEN expires_at <= clock.now THEN clock.now + :retention * interval '1 second'
                                   ELSE expires_at END
      FROM (SELECT clock_timestamp() AS now) AS clock
     WHERE scope = :scope AND key = :key AND attempt = :seen_attempt AND token = :seen_token
       AND NOT (:is_abandoned::boolean AND expires_at <= clock.now)
       AND (expires_at > clock.now OR token <> :token)
       AND CASE WHEN state = 'processing'
                THEN CASE WHEN lease_expires_at <= clock.now THEN true
                          WHEN owner IS NOT NULL AND :tests_owner::boolean
                          THEN pg_try_advisory_xact_lock_shared(owner)
                          ELSE false END
                WHEN state = 'unknown' THEN false
                ELSE expires_at <= clock.now OR (state = 'pending' AND :is_abandoned::boolean) END
 RETURNING scope, key, attempt, state
), noted AS (
    INSERT INTO semel_audit (at, scope, key, attempt, event, actor)
    SELECT clock_timestamp(), scope, key, attempt,
           CASE WHEN state = 'pending' THEN 'accepted'
                WHEN :is_abandoned::boolean AND attempt = :seen_attempt THEN 'claimed'
                ELSE 'taken over' END,
           :actor::text
      FROM taken
     WHERE :everything::boolean
        OR (:audit::boolean AND state <> 'pending' AND NOT (:is_abandoned::boolean AND attempt = :seen_attempt))
)
SELECT attempt
  FROM taken
 WHERE CASE WHEN state = 'pending' THEN pg_notify(:channel, 'accepted') IS NOT NULL ELSE true END


-- name: complete
-- Store how each operation ended. Only the attempt that holds the key may, and it proves it by its token.
-- The request is needed no more; the steps stay, for people to look at. Where there are hints, those who listen get them.
-- Those of one statement end in the same state and attempt. Scopes, statuses and headers are arrays only where there is
-- more than one of them. What is stored comes back by its place among the keys, in one array.
WITH ended AS (
    UPDATE semel_keys
       SET state = :state::text, status = coalesce(asked.status, :status::smallint),
           headers = coalesce(asked.headers, :headers::text), body = asked.body, completed_at = clock_timestamp(),
           lease_expires_at = NULL, owner = NULL, request = NULL, request_body = NULL, upkeep = NULL
      FROM unnest(:scopes::text[], :keys::text[], :tokens::bytea[], :statuses::smallint[], :headers_of_each::text[],
                  :bodies::bytea[]
--[hints
                , :hints::text[]
--]
                 ) WITH ORDINALITY AS asked (scope, key, token, status, headers, body
--[hints
                                           , hint
--]
                                           , place)
     WHERE semel_keys.scope = ANY (ARRAY[coalesce(asked.scope, :scope::text)]) AND semel_keys.key = asked.key
       AND semel_keys.attempt = :attempt::int AND semel_keys.token = asked.token AND semel_keys.state = 'processing'
 RETURNING asked.place
--[hints
         , asked.hint
--]
--[trail
         , semel_keys.scope, semel_keys.key
), noted AS (
    INSERT INTO semel_audit (at, scope, key, attempt, event, actor)
    SELECT clock_timestamp(), scope, key, :attempt::int,
           CASE :state::text WHEN 'complete' THEN 'completed' ELSE 'failed' END, :actor::text
      FROM ended
--]
)
SELECT array_agg(place)
  FROM ended
--[hints
 WHERE CASE WHEN hint IS NULL THEN true ELSE pg_notify(:channel, hint) IS NOT NULL END
--]


-- name: complete_one
-- The same for one operation.
UPDATE semel_keys
   SET state = :state::text, status = :status::smallint, headers = :headers::text, body = :body::bytea,
       completed_at = clock_timestamp(), lease_expires_at = NULL, owner = NULL, request = NULL, request_body = NULL,
       upkeep = NULL
 WHERE scope = :scope::text AND key = :key::text AND attempt = :attempt::int AND token = :token::bytea
   AND state = 'processing'
RETURNING true


-- name: completed
-- Say whether this very attempt has stored its answer: the reply to its statement may have been lost.
SELECT true
  FROM semel_keys
 WHERE scope = :scope AND key = :key AND attempt = :attempt AND token = :token AND state IN ('complete', 'failed')


-- name: release
-- Free the key, if this attempt still holds it; attempt 0 stands for whatever number its token was given.
-- An earlier attempt may have had its effect, and a step that was saved has had its own; and one that was accepted is
-- promised to be run, once a worker has begun it. Then the record stays: without a worker, and to be taken over at once.
-- Returns whether another worker's record is in the way.
WITH freed AS (
    DELETE FROM semel_keys
     WHERE scope = :scope AND key = :key AND token = :token AND :attempt::int IN (0, attempt)
       AND (state = 'pending' OR (state = 'processing' AND attempt = 1 AND steps IS NULL AND NOT accepted))
 RETURNING scope, key, attempt, 'released' AS event
), given_up AS (
    UPDATE semel_keys
       SET token = :no_token, lease_expires_at = clock_timestamp(), owner = NULL
     WHERE scope = :scope AND key = :key AND token = :token AND :attempt::int IN (0, attempt)
       AND state = 'processing' AND (attempt > 1 OR steps IS NOT NULL OR accepted)
 RETURNING scope, key, attempt, 'given up' AS event
), ended AS (
    SELECT * FROM freed UNION ALL SELECT * FROM given_up
), noted AS (
    INSERT INTO semel_audit (at, scope, key, attempt, event, actor, detail)
    SELECT clock_timestamp(), scope, key, attempt, event, :actor::text, :detail::text
      FROM ended
     WHERE :audit::boolean
)
SELECT EXISTS (SELECT FROM semel_keys WHERE scope = :scope AND key = :key) AND NOT EXISTS (SELECT FROM ended),
       (SELECT pg_notify(:channel, :hint::text) FROM ended WHERE :hint::text IS NOT NULL)


-- name: renew
-- Prolong every lease this process holds; return the keys it has lost. One with a dead owner is lost, though no other
-- has taken it yet: it was claimed just before its process lost its lock, when there was no one to tell.
-- SKIP LOCKED: a row that is locked is being completed, and a deadlock is not worth a renewal.
WITH asked AS (
    SELECT *
      FROM unnest(:scopes::text[], :keys::text[], :attempts::int[], :tokens::bytea[], :leases::float8[])
        AS asked (scope, key, attempt, token, lease)
), mine AS (
    SELECT asked.*
      FROM asked
     CROSS JOIN LATERAL (
        SELECT 1
          FROM semel_keys
         WHERE scope = asked.scope AND key = asked.key
           AND attempt = asked.attempt AND token = asked.token AND state = 'processing'
           AND CASE WHEN owner IS NOT NULL AND :tests_owner::boolean
                    THEN NOT pg_try_advisory_xact_lock_shared(owner) ELSE true END
           FOR UPDATE SKIP LOCKED
     ) AS locked
), renewed AS (
    UPDATE semel_keys
       SET lease_expires_at = clock_timestamp() + mine.lease * interval '1 second'
      FROM mine
     WHERE semel_keys.scope = ANY (ARRAY[mine.scope]) AND semel_keys.key = mine.key
)
SELECT scope, key, attempt, token
  FROM asked
 WHERE NOT EXISTS (
    SELECT
      FROM semel_keys
     WHERE scope = ANY (ARRAY[asked.scope]) AND key = asked.key
       AND attempt = asked.attempt AND token = asked.token AND state = 'processing'
       AND CASE WHEN owner IS NOT NULL AND :tests_owner::boolean
                THEN NOT pg_try_advisory_xact_lock_shared(owner) ELSE true END
 )


-- name: save
-- Store how far the operation has come. It joins the transaction of a phase, or is its own.
-- Only on top of what its worker knows: a copy that was held up on its way must not set back what has gone on since.
WITH saved AS (
    UPDATE semel_keys
       SET steps = CAST(:steps AS text), recovery_point = CAST(:recovery_point AS text)
     WHERE scope = CAST(:scope AS text) AND key = CAST(:key AS text)
       AND attempt = CAST(:attempt AS integer) AND token = CAST(:token AS bytea) AND state = 'processing'
       AND (steps IS NOT DISTINCT FROM CAST(:before AS text) OR steps IS NOT DISTINCT FROM CAST(:steps AS text))
 RETURNING scope, key, attempt
), noted AS (
    INSERT INTO semel_audit (at, scope, key, attempt, event, actor, detail)
    SELECT clock_timestamp(), scope, key, attempt, 'saved', CAST(:actor AS text), CAST(:detail AS text)
      FROM saved
     WHERE CAST(:audit AS boolean)
)
SELECT 1 FROM saved


-- name: mark
-- Store how far the handler says it is. Nothing depends on it, so the audit trail does not tell.
UPDATE semel_keys
   SET milestone = :milestone
 WHERE scope = :scope AND key = :key AND attempt = :attempt AND token = :token AND state = 'processing'
RETURNING 1


-- name: lock
-- Try to take the locks of a request and of its key until the transaction ends, and keep in a setting of the transaction
-- which of them it has, for the next statement. It is sent together with BEGIN and peek.
-- The request's own lock comes first, and the key's only with it. So a request that fails at the first knows that the
-- request which runs is the same, and one that fails at the second, that it is another.
-- It also notes which table is meant: a handler may change the search path, and another of that name is found then.
-- The locks' numbers come as text, because some drivers take every number for one of 32 bits.
SELECT set_config('semel.holder',
                  CASE WHEN pg_try_advisory_xact_lock(CAST(CAST(:request_lock AS text) AS bigint))
                       THEN CASE WHEN pg_try_advisory_xact_lock(CAST(CAST(:key_lock AS text) AS bigint))
                                 THEN 'mine' ELSE 'other' END
                       ELSE 'same' END,
                  true),
       set_config('semel.table', coalesce(CAST(CAST(to_regclass('semel_keys') AS oid) AS text), 'none'), true)


-- name: peek
-- Bring no row where the handler can be run: the locks are ours, there is no record, and one could be written at the
-- end; else begin tells why not. A driver that reads no rows of what it sends with BEGIN still learns their number.
-- It is a statement of its own after lock, so that it sees whatever was committed before the locks were free. It names the
-- newest column that finish needs: without that, the handler must not run.
SELECT 1
 WHERE current_setting('semel.holder') <> 'mine'
    OR current_setting('transaction_isolation') IN ('repeatable read', 'serializable')
    OR CAST(current_setting('transaction_read_only') AS boolean)
    OR NOT (has_any_column_privilege(CAST('semel_keys' AS regclass), 'SELECT')
            AND has_any_column_privilege(CAST('semel_keys' AS regclass), 'INSERT')
            AND has_any_column_privilege(CAST('semel_keys' AS regclass), 'UPDATE')
            AND has_any_column_privilege(CAST('semel_audit' AS regclass), 'INSERT'))
    OR EXISTS (SELECT traceparent, answer_day FROM semel_keys WHERE scope = CAST(:scope AS text) AND key = CAST(:key AS text))


-- name: begin
-- Try to take the locks, as lock does, and read what is there in any case: a finished record is the answer, whichever
-- transaction has the locks.
-- The read sees the table as it was before this statement took a lock. So it runs again once it has them, where it has
-- found nothing final.
-- It also says whether the record could be written at the end: not by a transaction that is read-only (a replica; a
-- server, a database or a role that was made so), nor by a role that lacks a privilege. A replica is told apart: what it
-- has may be old, so it is not even read.
WITH lock AS MATERIALIZED (
    SELECT CASE WHEN pg_try_advisory_xact_lock(CAST(CAST(:request_lock AS text) AS bigint))
                THEN CASE WHEN pg_try_advisory_xact_lock(CAST(CAST(:key_lock AS text) AS bigint))
                          THEN 'mine' ELSE 'other' END
                ELSE 'same' END AS holder,
           set_config('semel.table', coalesce(CAST(CAST(to_regclass('semel_keys') AS oid) AS text), 'none'), true)
)
SELECT lock.holder, pg_is_in_recovery() AS is_replica,
       CAST(current_setting('transaction_read_only') AS boolean) AS is_read_only,
       CASE WHEN NOT (has_any_column_privilege(CAST('semel_keys' AS regclass), 'SELECT')
                      AND has_any_column_privilege(CAST('semel_keys' AS regclass), 'INSERT')
                      AND has_any_column_privilege(CAST('semel_keys' AS regclass), 'UPDATE')
                      AND has_any_column_privilege(CAST('semel_audit' AS regclass), 'INSERT'))
            THEN CAST(current_user AS text) END AS powerless_role,
       current_setting('transaction_isolation') IN ('repeatable read', 'serializable') AS keeps_snapshot, found.*
  FROM lock
  LEFT JOIN (
    SELECT state, attempt, token, fingerprint, status, headers, coalesce(body, semel_answer(answer_day, token)),
           CASE WHEN lease_expires_at IS NULL OR lease_expires_at <= clock_timestamp() THEN true
                WHEN owner IS NOT NULL AND CAST(:tests_owner AS boolean) THEN pg_try_advisory_xact_lock_shared(owner)
                ELSE false END,
           date_part('epoch', expires_at - clock_timestamp()), steps, accepted, traceparent
      FROM semel_keys
     WHERE scope = CAST(:scope AS text) AND key = CAST(:key AS text)
  ) AS found ON true


-- name: probe
-- Meet a record that was committed after this transaction's snapshot, where one snapshot is kept to the end (REPEATABLE
-- READ and SERIALIZABLE): no read can see it, but the unique index does, and the server says that the transaction can't
-- be serialized. It runs in a savepoint and is undone at once.
INSERT INTO semel_keys (scope, key, state, attempt, token, fingerprint, created_at, lease_expires_at, expires_at)
SELECT CAST(:scope AS text), CAST(:key AS text), 'processing', 1, CAST(:token AS bytea), CAST(:fingerprint AS bytea),
       clock.now, clock.now, clock.now
  FROM (SELECT clock_timestamp() AS now) AS clock
    ON CONFLICT (scope, key) DO NOTHING


-- name: finish
-- Write the finished record into the transaction that did its work, where there was none. Another that came up meanwhile
-- violates the primary key, and then the transaction can't be committed: not even by a COMMIT that is sent with this.
-- What a policy says, and how it ended, is written into the text: each parameter costs the server some microseconds.
-- statement_timestamp() is the time at which this was received, and the same in every column.
-- The part "dated" is for a key that tells when it was made, "told" where others are given a hint.
INSERT INTO semel_keys (scope, key, state, attempt, token, fingerprint, status, headers, body,
                        created_at, completed_at, expires_at, on_crash, after_retention, request_line, traceparent)
SELECT CAST(:scope AS text), CAST(:key AS text), CAST(:state AS text),
       CAST(:attempt AS integer), CAST(:token AS bytea), CAST(:fingerprint AS bytea),
       CAST(:status AS smallint), CAST(:headers AS text), CAST(:body AS bytea),
       statement_timestamp(), statement_timestamp(), statement_timestamp() + CAST(:retention AS interval),
       CAST(:on_crash AS text),
--[plain
       CAST(:after_retention AS text),
--]
--[dated
       CASE WHEN CAST(:after_retention AS text) = 'strip' AND to_timestamp(CAST(:made_at AS float8)) <= statement_timestamp()
            THEN 'delete' ELSE CAST(:after_retention AS text) END,
--]
       CAST(:request_line AS text), CAST(:traceparent AS text)
--[told
 WHERE pg_notify(CAST(:channel AS text), CAST(:hint AS text)) IS NOT NULL
--]


-- name: note_finish
-- Goes before finish where the audit trail is to have everything.
WITH noted AS (
    INSERT INTO semel_audit (at, scope, key, attempt, event, actor)
    SELECT clock_timestamp(), CAST(:scope AS text), CAST(:key AS text), CAST(:attempt AS integer),
           CASE CAST(:state AS text) WHEN 'complete' THEN 'completed' ELSE 'failed' END, CAST(:actor AS text)
)


-- name: replace
-- Write the finished record in the place of the one that was seen, if that is still there and may be taken over. One that
-- did not expire stays the same operation.
WITH clock AS MATERIALIZED (
    SELECT clock_timestamp() AS now
), written AS (
    UPDATE semel_keys AS old
       SET state            = CAST(:state AS text),
           attempt          = CAST(:attempt AS integer),
           token            = CAST(:token AS bytea),
           status           = CAST(:status AS smallint),
           headers          = CAST(:headers AS text),
           body             = CAST(:body AS bytea),
           answer_day       = NULL,
           completed_at     = clock.now,
           lease_expires_at = NULL,
           owner            = NULL,
           accepted         = CASE WHEN old.expires_at <= clock.now THEN false ELSE old.accepted END,
           milestone        = CASE WHEN old.expires_at <= clock.now THEN NULL ELSE old.milestone END,
           request          = NULL,
           request_body     = NULL,
           upkeep           = NULL,
           request_line     = CASE WHEN old.expires_at <= clock.now THEN CAST(:request_line AS text)
                                   ELSE old.request_line END,
           traceparent      = CASE WHEN old.expires_at <= clock.now THEN CAST(:traceparent AS text)
                                   ELSE coalesce(CAST(:traceparent AS text), old.traceparent) END,
           steps            = CASE WHEN old.expires_at <= clock.now THEN NULL ELSE old.steps END,
           recovery_point   = CASE WHEN old.expires_at <= clock.now THEN NULL ELSE old.recovery_point END,
           fingerprint      = CASE WHEN old.expires_at <= clock.now THEN CAST(:fingerprint AS bytea)
                                   ELSE old.fingerprint END,
           on_crash         = CASE WHEN old.expires_at <= clock.now THEN CAST(:on_crash AS text) ELSE old.on_crash END,
           after_retention  = CASE WHEN old.expires_at > clock.now THEN old.after_retention
                                   WHEN CAST(:after_retention AS text) = 'strip'
                                        AND to_timestamp(CAST(:made_at AS float8)) <= clock.now THEN 'delete'
                                   ELSE CAST(:after_retention AS text) END,
           created_at       = CASE WHEN old.expires_at <= clock.now THEN clock.now ELSE old.created_at END,
           expires_at       = CASE WHEN old.expires_at <= clock.now
                                   THEN clock.now + CAST(:retention AS float8) * interval '1 second'
                                   ELSE old.expires_at END
      FROM clock
     WHERE old.scope = CAST(:scope AS text) AND old.key = CAST(:key AS text)
       AND old.attempt = CAST(:seen_attempt AS integer) AND old.token = CAST(:seen_token AS bytea)
       AND CASE WHEN old.state = 'processing'
                THEN CASE WHEN old.lease_expires_at <= clock.now THEN true
                          WHEN old.owner IS NOT NULL AND CAST(:tests_owner AS boolean)
                          THEN pg_try_advisory_xact_lock_shared(old.owner)
                          ELSE false END
                WHEN old.state = 'unknown' THEN false
                ELSE old.expires_at <= clock.now END
 RETURNING old.scope, old.key, old.attempt, old.state, old.created_at < clock.now AS is_the_same
), noted AS (
    INSERT INTO semel_audit (at, scope, key, attempt, event, actor)
    SELECT clock_timestamp(), scope, key, attempt,
           CASE WHEN NOT CAST(:everything AS boolean) THEN 'taken over'
                WHEN state = 'complete' THEN 'completed' ELSE 'failed' END,
           CAST(:actor AS text)
      FROM written
     WHERE CAST(:everything AS boolean) OR (CAST(:audit AS boolean) AND is_the_same)
)
SELECT 1
  FROM written
 WHERE CASE WHEN CAST(:hint AS text) IS NULL THEN true
            ELSE pg_notify(CAST(:channel AS text), CAST(:hint AS text)) IS NOT NULL END


-- name: wait
-- Wait until no transaction of atomic mode has the key's lock. It is let go again at once.
SELECT pg_advisory_xact_lock(CAST(:key_lock AS text)::bigint)


-- name: settle
-- One record, whole, once no transaction is changing it any more.
SELECT scope, key, state, attempt, token, fingerprint, recovery_point, steps, status, headers,
       coalesce(body, semel_answer(answer_day, token)), body IS NULL AND answer_day IS NULL, accepted, milestone, request_line, traceparent, created_at, lease_expires_at, completed_at, expires_at,
       clock_timestamp()
  FROM semel_keys
 WHERE scope = :scope AND key = :key
   FOR UPDATE


-- name: park
-- Stop an operation until an operator has said what it did. Its worker may ask for it, and may ask twice; or, once that
-- is silent, others: of several that ask at once, one is told that it did. A pending one has no worker yet.
-- It leaves the index that the reaper walks: what is parked never expires.
WITH parked AS (
    UPDATE semel_keys
       SET state = 'unknown', lease_expires_at = NULL, owner = NULL, upkeep = 'parked'
     WHERE scope = :scope AND key = :key AND attempt = :attempt AND token = :token
       AND state IN ('pending', 'processing')
       AND CASE WHEN NOT :if_silent::boolean OR lease_expires_at IS NULL OR lease_expires_at <= clock_timestamp()
                THEN true
                WHEN owner IS NOT NULL AND :tests_owner::boolean THEN pg_try_advisory_xact_lock_shared(owner)
                ELSE false END
 RETURNING scope, key, attempt
), noted AS (
    INSERT INTO semel_audit (at, scope, key, attempt, event, actor, detail)
    SELECT clock_timestamp(), scope, key, attempt, 'parked', :actor::text, :detail::text
      FROM parked
     WHERE :audit::boolean
)
SELECT 1 FROM parked
 UNION ALL
SELECT 1 FROM semel_keys
 WHERE scope = :scope AND key = :key AND attempt = :attempt AND token = :token AND state = 'unknown'
   AND NOT :if_silent::boolean


-- name: look
-- One record, whole.
SELECT scope, key, state, attempt, token, fingerprint, recovery_point, steps, status, headers,
       coalesce(body, semel_answer(answer_day, token)), body IS NULL AND answer_day IS NULL, accepted, milestone, request_line, traceparent, created_at, lease_expires_at, completed_at, expires_at,
       clock_timestamp()
  FROM semel_keys
 WHERE scope = :scope AND key = :key


-- name: browse
-- The newest records, without their bodies. It walks back in time until it has enough, so what is rare is far to seek.
-- The part "unfinished" is for the states that an operation leaves again: those records are followed (see advance), or
-- younger than the watermark, and nothing else is read.
SELECT scope, key, state, attempt, token, fingerprint, recovery_point, steps, status, headers, ''::bytea,
       body IS NULL AND answer_day IS NULL, accepted, milestone, request_line, traceparent, created_at, lease_expires_at, completed_at, expires_at,
       clock_timestamp()
--[plain
  FROM (SELECT * FROM semel_keys WHERE created_at >= :made_from::timestamptz) AS live
--]
--[unfinished
  FROM (SELECT * FROM semel_keys WHERE upkeep = 'open' AND created_at >= :followed_from::timestamptz
         UNION ALL
        SELECT * FROM semel_keys WHERE upkeep = 'parked'
         UNION ALL
        SELECT * FROM semel_keys
         WHERE upkeep IS NULL
           AND created_at >= coalesce((SELECT swept_to FROM semel_keys_watermark WHERE one), '-infinity')) AS unfinished
--]
 WHERE (:scope::text IS NULL OR scope = :scope)
   AND (:key::text IS NULL OR key = :key)
   AND (:state::text IS NULL OR state = :state)
   AND (:digest::text IS NULL OR starts_with(encode(sha256(convert_to(key, 'UTF8')), 'hex'), :digest))
 ORDER BY created_at DESC
 LIMIT :limit


-- name: search
-- A page of the records that fit, without their bodies. It walks along their age, past at most :scan records, and is the
-- same work whatever is in the table. "unfinished" walks past those that are followed (see advance) or younger than the
-- watermark; "scope" first looks whether the owner has a few records only, by the primary key; "one" knows its record.
-- Each row says how many were walked past; "bound" is where the walk ended at its limit, and what is beyond it is not
-- returned: of two walks, one may have come further than the other.
-- The trail is asked by a scalar subquery: the planner would make a hash table of all of it for EXISTS.
WITH clock AS MATERIALIZED (
    SELECT now, now - :newer::float8 * interval '1 second' AS earliest, now - :older::float8 * interval '1 second' AS latest
      FROM (SELECT clock_timestamp() AS now) AS read
--[scope
), few AS MATERIALIZED (
    SELECT ctid AS place, created_at, scope, key, state, status, lease_expires_at, request_line
      FROM semel_keys
     WHERE scope = :scope
     ORDER BY scope, key
     LIMIT :few + 1
--]
), walked AS MATERIALIZED (
--[one
    SELECT 0 AS walk, ctid AS place, created_at, scope, key, state, status, lease_expires_at, request_line
      FROM semel_keys
     WHERE scope = :scope AND key = :key
--]
--[scope
    SELECT 0 AS walk, place, created_at, scope, key, state, status, lease_expires_at, request_line
      FROM few
     WHERE (SELECT count(*) FROM few) <= :few
     UNION ALL
--]
--[age
    (SELECT 1 AS walk, ctid AS place, created_at, scope, key, state, status, lease_expires_at, request_line
       FROM semel_keys
      WHERE created_at <= least(:at::timestamptz, (SELECT latest FROM clock))
        AND created_at >= greatest((SELECT earliest FROM clock), :made_from::timestamptz)
        AND (created_at, scope, key) < (:at::timestamptz, :at_scope::text, :at_key::text)
--]
--[scope
        AND (SELECT count(*) FROM few) > :few
--]
--[age
      ORDER BY created_at DESC, scope DESC, key DESC
      LIMIT :scan)
--]
--[unfinished
    (SELECT 1 AS walk, ctid AS place, created_at, scope, key, state, status, lease_expires_at, request_line
       FROM semel_keys
      WHERE upkeep = :upkeep AND created_at <= :at::timestamptz AND created_at >= :upkeep_from::timestamptz
        AND (created_at, scope, key) < (:at::timestamptz, :at_scope::text, :at_key::text)
      ORDER BY created_at DESC, scope DESC, key DESC
      LIMIT :scan)
     UNION ALL
    (SELECT 2 AS walk, ctid AS place, created_at, scope, key, state, status, lease_expires_at, request_line
       FROM semel_keys
      WHERE :upkeep <> 'parked' AND upkeep IS NULL AND created_at <= :at::timestamptz
        AND created_at >= coalesce((SELECT swept_to FROM semel_keys_watermark WHERE one), '-infinity')
        AND (created_at, scope, key) < (:at::timestamptz, :at_scope::text, :at_key::text)
      ORDER BY created_at DESC, scope DESC, key DESC
      LIMIT :scan)
--]
), ends AS (
    SELECT DISTINCT ON (walk) created_at, scope, key, count(*) OVER (PARTITION BY walk) AS length
      FROM walked
     WHERE walk > 0
     ORDER BY walk, created_at, scope, key
), bound AS MATERIALIZED (
    SELECT created_at, scope, key
      FROM ends
     WHERE length >= :scan
     ORDER BY created_at DESC, scope DESC, key DESC
     LIMIT 1
), fitting AS MATERIALIZED (
    SELECT place
      FROM walked AS record, clock
     WHERE NOT EXISTS (SELECT 1 FROM bound
                        WHERE (record.created_at, record.scope, record.key) < (bound.created_at, bound.scope, bound.key))
       AND (record.created_at, record.scope, record.key) < (:at::timestamptz, :at_scope::text, :at_key::text)
       AND (:scope::text IS NULL OR record.scope = :scope)
       AND (:key::text IS NULL OR record.key = :key)
       AND (:state::text IS NULL OR state = :state)
       AND (NOT :stuck::boolean OR (state = 'processing' AND lease_expires_at <= now))
       AND (:lowest::integer IS NULL OR status BETWEEN :lowest AND :highest::integer)
       AND (:newer::float8 IS NULL OR created_at >= earliest)
       AND (:older::float8 IS NULL OR created_at <= latest)
       AND (:endpoint::text IS NULL OR strpos(request_line, :endpoint) > 0)
       AND (:digest::text IS NULL OR starts_with(encode(sha256(convert_to(record.key, 'UTF8')), 'hex'), :digest))
       AND (:reason::text IS NULL
            OR (SELECT true FROM semel_audit AS line
                 WHERE line.scope = record.scope AND line.key = record.key AND strpos(line.detail, :reason) > 0
                 LIMIT 1))
     ORDER BY record.created_at DESC, record.scope DESC, record.key DESC
     LIMIT :limit
)
SELECT (SELECT count(*) FROM walked), bound.created_at, bound.scope, bound.key, found.*
  FROM (SELECT) AS always
  LEFT JOIN bound ON true
  LEFT JOIN LATERAL (
    SELECT scope, key, state, attempt, token, fingerprint, recovery_point, steps, status, headers, ''::bytea,
           body IS NULL AND answer_day IS NULL, accepted, milestone, request_line, traceparent, created_at, lease_expires_at, completed_at, expires_at,
           (SELECT now FROM clock) AS now
      FROM semel_keys
     WHERE ctid = ANY (ARRAY(SELECT place FROM fitting))
  ) AS found ON true
 ORDER BY found.created_at DESC, found.scope DESC, found.key DESC


-- name: bound
-- Where the live entries of an index begin (bounds.py): the first from :start on, and how many entries of indexes were
-- read for it, dead ones included. The count before goes first, since the look-up depends on it.
-- The parts are the walks: "made" is of all records by age, "followed" of those that the services follow, "expiring" of
-- those that expire, and "handled" of the receipts of messages. What is younger than the watermark may be followed yet.
WITH counted AS MATERIALIZED (
    SELECT array_agg(indexrelid) AS indexes, coalesce(sum(pg_stat_get_xact_tuples_returned(indexrelid)), 0) AS before
      FROM pg_catalog.pg_index
--[made
     WHERE indrelid = CAST('semel_keys' AS regclass)
--]
--[followed
     WHERE indrelid = CAST('semel_keys' AS regclass)
--]
--[expiring
     WHERE indrelid = CAST('semel_keys' AS regclass)
--]
--[handled
     WHERE indrelid = CAST('semel_inbox' AS regclass)
--]
)
SELECT least(place, clock_timestamp() - :settled::float8 * interval '1 second'
--[followed
             , coalesce((SELECT swept_to FROM semel_keys_watermark WHERE one), :start::timestamptz)
--]
            ),
       CAST((SELECT coalesce(sum(pg_stat_get_xact_tuples_returned(each)), 0) FROM unnest(indexes) AS each) - before
            AS bigint)
  FROM counted
  LEFT JOIN LATERAL (
--[made
    SELECT created_at AS place FROM semel_keys
     WHERE created_at >= :start::timestamptz AND before >= 0
--]
--[followed
    SELECT created_at AS place FROM semel_keys
     WHERE upkeep = 'open' AND created_at >= :start::timestamptz AND before >= 0
--]
--[expiring
    SELECT expires_at AS place FROM semel_keys
     WHERE after_retention <> 'keep' AND upkeep IS DISTINCT FROM 'parked' AND expires_at >= :start::timestamptz
       AND before >= 0
--]
--[handled
    SELECT changed_at AS place FROM semel_inbox
     WHERE state = 'done' AND changed_at >= :start::timestamptz AND before >= 0
--]
     ORDER BY place
     LIMIT 1
  ) AS first ON true


-- name: advance
-- Follow what takes long. Most operations end within seconds, and nothing has to look for them: no index tells them from
-- those that have ended. This walks along the age of the records, from the watermark on, past each of them once. What it
-- finds unfinished is followed from then on: it gets into a small index, and stays there until it ends. Its end is then
-- no heap-only update; but it is one of few.
-- The cost: one entry of an index for each record that is made, in the order of time, and one look at it, later, by
-- whichever service comes along; for an operation that takes long, one more write.
-- The watermark stays :settled seconds behind the clock. A claim can't take that long from its clock to its COMMIT, so
-- none can appear behind the watermark. A clock that was set back by more than that makes it start anew.
-- The part "back" is for a service that has not looked for that long. Meanwhile a clock may have been set back and have
-- come past the watermark again, and then it has to start anew as well. It looks at the :back records behind the
-- watermark: one in progress should be followed; and one that says that it ended before the watermark was written, but
-- was written later (by the age of its transaction), was made by such a clock.
-- At most :window records are walked past; it returns whether there may be more. A watermark that would move by a few
-- seconds stays where it is: services that look every second need not write every second.
-- Behind a pooler a claim may wait for longer, but its client has given up by then: a retry takes it over.
-- SKIP LOCKED: no record is waited for. The watermark stays in front of what is locked, or was changed meanwhile.
WITH clock AS MATERIALIZED (
    SELECT clock_timestamp() - :settled::float8 * interval '1 second' AS settled
), watermark AS MATERIALIZED (
    SELECT coalesce((SELECT swept_to
                       FROM semel_keys_watermark AS mark, clock
                      WHERE one AND swept_to <= settled
--[back
                        AND NOT EXISTS (
                            SELECT FROM (SELECT state, completed_at, after_retention, upkeep, age(xmin) AS age
                                           FROM semel_keys
                                          WHERE created_at < mark.swept_to
                                          ORDER BY created_at DESC
                                          LIMIT :back) AS behind
                             WHERE upkeep IS NULL AND after_retention <> 'keep'
                               AND CASE WHEN completed_at IS NULL THEN state IN ('pending', 'processing')
                                        ELSE completed_at < mark.swept_to AND behind.age < age(mark.xmin) END)
--]
                    ), '-infinity') AS swept_to
), walked AS MATERIALIZED (
    SELECT found.*
      FROM watermark, clock
     CROSS JOIN LATERAL (
        SELECT ctid AS place, created_at, state IN ('pending', 'processing') AND upkeep IS NULL AS is_new
          FROM semel_keys
         WHERE created_at >= watermark.swept_to AND created_at <= clock.settled
         ORDER BY created_at
         LIMIT :window
     ) AS found
), locked AS MATERIALIZED (
    SELECT ctid AS place
      FROM semel_keys
     WHERE ctid = ANY (ARRAY(SELECT place FROM walked WHERE is_new)) AND state IN ('pending', 'processing')
       FOR UPDATE SKIP LOCKED
), followed AS (
    UPDATE semel_keys
       SET upkeep = 'open'
     WHERE ctid = ANY (ARRAY(SELECT place FROM locked))
), counted AS MATERIALIZED (
    SELECT count(*) = :window AS is_full, max(created_at) AS last FROM walked
), target AS MATERIALIZED (
    SELECT coalesce((SELECT min(created_at) FROM walked
                      WHERE is_new AND place <> ALL (ARRAY(SELECT place FROM locked))),
                    CASE WHEN is_full THEN greatest(last, watermark.swept_to + interval '1 microsecond') END,
                    clock.settled) AS swept_to
      FROM watermark, clock, counted
), moved AS (
    INSERT INTO semel_keys_watermark AS old (one, swept_to)
    SELECT true, swept_to
      FROM target
        ON CONFLICT (one) DO UPDATE
       SET swept_to = excluded.swept_to
     WHERE excluded.swept_to NOT BETWEEN old.swept_to AND old.swept_to + interval '5 seconds'
        OR (SELECT is_full FROM counted) OR (SELECT swept_to FROM watermark) = '-infinity'
)
SELECT is_full FROM counted


-- name: find_stuck
-- The records with a worker that is silent past its lease, or dead; and those that wait for their first worker, by their age.
-- Scopes take turns, and of each scope the longest silent comes first. Past its retention it is the reaper's.
-- When a process died is not known: it counts as silent from now on, and not before.
-- MATERIALIZED: the clock is read once, so that who is silent for longer comes first.
-- At most :window of those that are followed are looked at from the oldest on, and as many from some moment on: one scope
-- that has more than that to do can't hide for long what others have behind it. Of the younger ones that are not followed
-- yet (see advance), at most :window are read.
-- The rest of a record is read when it is chosen, at its place (ctid), which stays the same within a statement.
-- What is due after its pause is said in words of its own in core/upkeep.py.
WITH clock AS MATERIALIZED (
    SELECT clock_timestamp() AS now
), oldest AS MATERIALIZED (
    SELECT created_at
      FROM semel_keys
     WHERE upkeep = 'open' AND created_at >= :followed_from::timestamptz
     ORDER BY created_at
     LIMIT 1
), start AS MATERIALIZED (
    SELECT created_at AS at FROM oldest
     UNION ALL
    SELECT created_at + random() * (clock.now - created_at) FROM oldest, clock
), unfinished AS MATERIALIZED (
    SELECT followed.*
      FROM start
     CROSS JOIN LATERAL (
        SELECT ctid AS place, scope, state, created_at, lease_expires_at, expires_at, token, owner, accepted, tries,
               request IS NOT NULL AS has_request
          FROM semel_keys
         WHERE upkeep = 'open' AND created_at >= start.at
         ORDER BY created_at
         LIMIT :window
     ) AS followed
     UNION
    SELECT young.*
      FROM (
        SELECT ctid AS place, scope, state, created_at, lease_expires_at, expires_at, token, owner, accepted, tries,
               request IS NOT NULL AS has_request
          FROM semel_keys
         WHERE created_at >= coalesce((SELECT swept_to FROM semel_keys_watermark WHERE one), '-infinity')
         ORDER BY created_at
         LIMIT :window
     ) AS young
), due AS MATERIALIZED (
    SELECT place, scope, least(coalesce(lease_expires_at, created_at), clock.now) AS silent_since
      FROM unfinished, clock
     WHERE (state = 'processing' OR (state = 'pending' AND :with_pending::boolean)) AND expires_at > clock.now
       AND (:with_no_token::boolean OR token <> :no_token)
       AND (NOT :with_request::boolean OR has_request)
       AND CASE WHEN lease_expires_at IS NULL OR lease_expires_at <= clock.now THEN true
                WHEN owner IS NOT NULL AND :tests_owner::boolean THEN pg_try_advisory_xact_lock_shared(owner)
                ELSE false END
       AND (NOT :only_due::boolean
            OR (accepted AND (tries = 0 OR token <> :no_token))
            OR clock.now - least(coalesce(lease_expires_at, created_at), clock.now)
               >= make_interval(secs => :first_pause::float8)
                  * (1 << least(tries - accepted::integer, :most_doublings::integer)))
), chosen AS MATERIALIZED (
    SELECT place, silent_since, row_number() OVER (PARTITION BY scope ORDER BY silent_since) AS turn
      FROM due
     ORDER BY turn, silent_since
     LIMIT :limit
)
SELECT found.scope, found.key, found.attempt, found.token, found.on_crash, found.steps, found.has_request,
       clock.now - chosen.silent_since, found.tries, found.accepted
  FROM clock, chosen
 CROSS JOIN LATERAL (
    SELECT scope, key, attempt, token, on_crash, steps, request IS NOT NULL AS has_request, tries, accepted
      FROM semel_keys
     WHERE ctid = chosen.place
    OFFSET 0
 ) AS found
 ORDER BY chosen.turn, chosen.silent_since


-- name: read_request
-- The request that was kept with a record.
SELECT request, request_body
  FROM semel_keys
 WHERE scope = :scope AND key = :key AND attempt = :attempt AND token = :token AND request IS NOT NULL


-- name: sweep
-- Free the key of a worker that is silent past its lease, or dead. The record stays, and the next request takes it
-- over: no worker holds it any more, so its lease is over now, if it was not.
WITH swept AS (
    UPDATE semel_keys
       SET token = :no_token, lease_expires_at = least(lease_expires_at, clock_timestamp()), owner = NULL
     WHERE scope = :scope AND key = :key AND attempt = :attempt AND token = :token AND state = 'processing'
       AND CASE WHEN lease_expires_at <= clock_timestamp() THEN true
                WHEN owner IS NOT NULL AND :tests_owner::boolean THEN pg_try_advisory_xact_lock_shared(owner)
                ELSE false END
 RETURNING scope, key, attempt
), noted AS (
    INSERT INTO semel_audit (at, scope, key, attempt, event, actor)
    SELECT clock_timestamp(), scope, key, attempt, 'swept', :actor::text
      FROM swept
     WHERE :audit::boolean
)
SELECT 1 FROM swept


-- name: survey
-- What graphs and people see of the store: counts up to :limit, ages in seconds. What has ended is not counted, for no
-- index tells it from the rest: of that there are an estimate, and the :newest records, among which are those in progress
-- that are not followed yet (see advance).
-- Each part reads at most so many entries of an index, whatever the size of the table: of those that are followed, the
-- oldest and the newest. The orders are those of the indexes: in a table that was never analysed, the planner would walk
-- along the table otherwise.
-- In progress without a token: a worker gave it back, and it waits for its next request.
WITH clock AS MATERIALIZED (
    SELECT clock_timestamp() AS now
), followed AS MATERIALIZED (
    (SELECT ctid AS place, state, token, created_at, lease_expires_at
       FROM semel_keys
      WHERE upkeep = 'open' AND created_at >= :followed_from::timestamptz
      ORDER BY created_at
      LIMIT :limit)
     UNION
    (SELECT ctid, state, token, created_at, lease_expires_at
       FROM semel_keys
      WHERE upkeep = 'open' AND created_at >= :followed_from::timestamptz
      ORDER BY created_at DESC
      LIMIT :limit)
), newest AS MATERIALIZED (
    SELECT ctid AS place, state, token, created_at, lease_expires_at, upkeep
      FROM semel_keys
     WHERE created_at >= :made_from::timestamptz
     ORDER BY created_at DESC
     LIMIT :newest
), judged AS MATERIALIZED (
    SELECT place, created_at,
           CASE WHEN state = 'pending' THEN 'accepted'
                WHEN lease_expires_at > now THEN 'in flight'
                WHEN token <> decode(repeat('00', 16), 'hex') THEN 'stuck'
                ELSE 'free' END AS what
      FROM (SELECT place, state, token, created_at, lease_expires_at FROM followed
             UNION ALL
            SELECT place, state, token, created_at, lease_expires_at FROM newest
             WHERE upkeep IS NULL AND state IN ('processing', 'pending')) AS unfinished, clock
), counted AS MATERIALIZED (
    SELECT what, least(count(*), :limit) AS count, min(created_at) AS since FROM judged GROUP BY what
), ends AS MATERIALIZED (
    SELECT count(*) AS count, min(created_at) AS since, count(*) FILTER (WHERE state = 'complete') AS complete,
           count(*) FILTER (WHERE state = 'failed') AS failed,
           count(*) FILTER (WHERE created_at > :since::timestamptz) AS made
      FROM newest
)
--[messages
, unsent AS MATERIALIZED (
    SELECT created_at FROM (SELECT created_at FROM semel_outbox WHERE state = 'ready'
                             ORDER BY aggregatetype, seq LIMIT :limit) AS ready
     UNION ALL
    SELECT created_at FROM (SELECT created_at FROM semel_outbox WHERE state = 'waiting'
                             ORDER BY aggregatetype, due_at LIMIT :limit) AS waiting
     UNION ALL
    SELECT created_at FROM (SELECT created_at, state FROM semel_outbox
                             WHERE state IN ('waiting', 'behind', 'dead') AND aggregateid IS NOT NULL
                             ORDER BY aggregatetype, aggregateid, seq LIMIT :limit) AS aside
     WHERE state = 'behind'
)
--]
SELECT now, oldest.scope, oldest.key, oldest.created_at,
       coalesce((SELECT count FROM counted WHERE what = 'free'), 0),
       CASE WHEN ends.count < :newest THEN ends.count
            ELSE (SELECT reltuples::bigint FROM pg_catalog.pg_class
                   WHERE oid = to_regclass('semel_keys') AND reltuples >= ends.count) END,
       ends.count, ends.since, ends.complete, ends.failed, ends.made,
       (SELECT count(*) FROM followed) >= 2 * :limit,
       coalesce((SELECT count FROM counted WHERE what = 'in flight'), 0),
       coalesce((SELECT count FROM counted WHERE what = 'stuck'), 0),
       (SELECT count(*) FROM (SELECT 1 FROM semel_keys WHERE upkeep = 'parked' ORDER BY created_at LIMIT :limit) AS parked),
       coalesce((SELECT count FROM counted WHERE what = 'accepted'), 0),
       (SELECT count(*)
          FROM (SELECT state, lease_expires_at
                  FROM semel_keys
                 WHERE after_retention <> 'keep' AND upkeep IS DISTINCT FROM 'parked'
                   AND expires_at >= :expiring_from::timestamptz AND expires_at <= (SELECT now FROM clock)
                 ORDER BY expires_at
                 LIMIT :limit) AS expired
         WHERE state <> 'processing' OR lease_expires_at <= now),
       coalesce(date_part('epoch', now - (SELECT since FROM counted WHERE what = 'in flight')), 0),
       coalesce(date_part('epoch', now - (SELECT since FROM counted WHERE what = 'accepted')), 0)
--[messages
     , (SELECT least(count(*), :limit) FROM unsent),
       (SELECT coalesce(date_part('epoch', max(now - created_at)), 0) FROM unsent),
       (SELECT count(*)
          FROM (SELECT 1 FROM semel_outbox WHERE state = 'dead'
                 ORDER BY ended_at LIMIT :limit) AS dead),
       (SELECT count(*)
          FROM (SELECT state FROM semel_inbox WHERE state <> 'done' ORDER BY consumer DESC, state DESC, changed_at DESC
                 LIMIT :limit) AS failing
         WHERE state = 'parked')
--]
  FROM clock
 CROSS JOIN ends
  LEFT JOIN LATERAL (
    SELECT scope, key, created_at
      FROM semel_keys
     WHERE ctid = ANY (ARRAY(SELECT place FROM judged WHERE what = 'in flight' ORDER BY created_at LIMIT 1))
  ) AS oldest ON true


-- name: add_counts
-- Add what a process has counted to the counts of this minute, and delete those that are two hours old. Sorted, because
-- two processes that add the same outcomes in different orders deadlock.
WITH old AS (
    DELETE FROM semel_counts WHERE minute < (SELECT clock_timestamp() - interval '2 hours')
)
INSERT INTO semel_counts AS there (minute, outcome, n)
SELECT date_trunc('minute', clock_timestamp()), outcome, n
  FROM unnest(:outcomes::text[], :numbers::bigint[]) AS counted (outcome, n)
 ORDER BY outcome
    ON CONFLICT (minute, outcome) DO UPDATE
   SET n = there.n + excluded.n
RETURNING 1


-- name: read_counts
-- What was counted in the last minutes; one row at least, for the time.
SELECT clock.now, minute, outcome, n
  FROM (SELECT clock_timestamp() AS now) AS clock
  LEFT JOIN semel_counts ON minute > (SELECT clock_timestamp() - :minutes::integer * interval '1 minute')


-- name: reap
-- Clear away what is past its retention, the oldest first: delete it; or leave a tombstone where a late retry is to be
-- refused; or, where it never ended and no worker holds it, say that it failed. That one is deleted another time.
-- Its index has neither tombstones nor what is parked; in flight past its retention is next to nothing.
-- (SELECT clock_timestamp()), because a volatile function can't be looked up in an index.
-- SKIP LOCKED: several may reap at once, and no record is waited for. A row that is locked stays where it is,
-- so that it is found again by its place (ctid) and not by its key.
-- A token of no worker: the silent worker, should it wake, must not take the answer for its own.
-- The trail has one line that sums up; or, where everything is asked for, one for each record. What was abandoned has
-- its own line in any case.
WITH due AS (
    SELECT ctid AS place, CASE WHEN state IN ('complete', 'failed') THEN after_retention ELSE 'fail' END AS fate
      FROM semel_keys
     WHERE after_retention <> 'keep' AND upkeep IS DISTINCT FROM 'parked'
       AND expires_at >= :expiring_from::timestamptz AND expires_at <= (SELECT clock_timestamp())
       AND (state IN ('complete', 'failed', 'pending')
            OR (state = 'processing' AND lease_expires_at <= (SELECT clock_timestamp())))
     ORDER BY expires_at
     LIMIT :limit
       FOR UPDATE SKIP LOCKED
), deleted AS (
    DELETE FROM semel_keys
     WHERE ctid = ANY (ARRAY(SELECT place FROM due WHERE fate = 'delete'))
 RETURNING scope, key, attempt, 'reaped' AS event
), stripped AS (
    UPDATE semel_keys
       SET headers = '[]', body = NULL, answer_day = NULL, steps = NULL, recovery_point = NULL, after_retention = 'keep'
     WHERE ctid = ANY (ARRAY(SELECT place FROM due WHERE fate = 'strip'))
 RETURNING scope, key, attempt, 'stripped' AS event
), failed AS (
    UPDATE semel_keys
       SET state = 'failed', status = :status, headers = :headers, body = :body, completed_at = clock_timestamp(),
           token = :no_token, lease_expires_at = NULL, owner = NULL, request = NULL, request_body = NULL,
           upkeep = NULL
     WHERE ctid = ANY (ARRAY(SELECT place FROM due WHERE fate = 'fail'))
 RETURNING scope, key, attempt, 'abandoned' AS event
), counted AS MATERIALIZED (
    SELECT (SELECT count(*) FROM deleted) AS deleted, (SELECT count(*) FROM stripped) AS stripped,
           (SELECT count(*) FROM failed) AS failed
), noted AS (
    INSERT INTO semel_audit (at, scope, key, attempt, event, actor, detail)
    SELECT clock_timestamp(), scope, key, attempt, event, :actor::text, NULL
      FROM (SELECT * FROM deleted UNION ALL SELECT * FROM stripped) AS reaped
     WHERE :everything::boolean
     UNION ALL
    SELECT clock_timestamp(), scope, key, attempt, event, :actor::text, NULL
      FROM failed
     WHERE :audit::boolean
     UNION ALL
    SELECT clock_timestamp(), '', '', 0, 'reaped', :actor::text, 
           concat_ws(', ', CASE WHEN deleted > 0 THEN deleted || ' deleted' END,
                           CASE WHEN stripped > 0 THEN stripped || ' stripped' END)
      FROM counted
     WHERE :audit::boolean AND NOT :everything::boolean AND deleted + stripped > 0
)
SELECT deleted, stripped, failed FROM counted


-- name: rotate
-- One step with the partitions of the partitioned layout; nothing in the plain one. The function is in schema.sql.
SELECT made, dropped, deleted, trouble FROM semel_rotate_answers(:expiring_from::timestamptz, :limit::integer)


-- name: reap_trail
-- Delete old lines of the audit trail.
WITH deleted AS (
    DELETE FROM semel_audit
     WHERE ctid = ANY (ARRAY(
        SELECT ctid
          FROM semel_audit
         WHERE at <= (SELECT clock_timestamp() - :older_than * interval '1 second')
         LIMIT :limit
           FOR UPDATE SKIP LOCKED
     ))
 RETURNING 1
)
SELECT count(*) FROM deleted


-- name: reap_inbox
-- Delete old receipts of handled messages: along semel_inbox_age, from its old end. Nothing else is read.
WITH deleted AS (
    DELETE FROM semel_inbox
     WHERE ctid = ANY (ARRAY(
        SELECT ctid
          FROM semel_inbox
         WHERE state = 'done'
           AND changed_at >= :handled_from::timestamptz
           AND changed_at <= (SELECT clock_timestamp() - :older_than * interval '1 second')
         ORDER BY changed_at
         LIMIT :limit
           FOR UPDATE SKIP LOCKED
     ))
 RETURNING 1
)
SELECT count(*) FROM deleted


-- name: erase
-- Make tombstones of the records of one owner that have ended: of what was said, nothing stays but a digest and a status;
-- so a retry is refused, and runs nothing. It walks along the primary key, past each record of this owner once, and says
-- of each what it is: what has not ended stays as it is.
-- SKIP LOCKED: no record is waited for. One that another transaction is changing comes back as it was.
-- The trail has one line that sums up, and names neither owner nor key.
WITH walked AS MATERIALIZED (
    SELECT ctid AS place, scope, key, state, answer_day, token,
           status IS NOT NULL
           AND (headers IS DISTINCT FROM '[]' OR body IS NOT NULL OR answer_day IS NOT NULL OR steps IS NOT NULL OR recovery_point IS NOT NULL
                OR request IS NOT NULL OR milestone IS NOT NULL OR request_line IS NOT NULL
                OR traceparent IS NOT NULL) AS has_data
      FROM semel_keys
     WHERE (scope, key) > (:at_scope::text, :at_key::text) AND scope < :end::text
     ORDER BY scope, key
     LIMIT :limit
), locked AS MATERIALIZED (
    SELECT ctid AS place
      FROM semel_keys
     WHERE ctid = ANY (ARRAY(SELECT place FROM walked WHERE has_data AND NOT :is_preview::boolean))
       AND status IS NOT NULL
       FOR UPDATE SKIP LOCKED
), erased AS (
    UPDATE semel_keys
       SET headers = '[]', body = NULL, answer_day = NULL, steps = NULL, recovery_point = NULL, request = NULL,
           request_body = NULL, milestone = NULL, request_line = NULL, traceparent = NULL
     WHERE ctid = ANY (ARRAY(SELECT place FROM locked))
 RETURNING scope, key
), noted AS (
    INSERT INTO semel_audit (at, scope, key, attempt, event, actor, detail)
    SELECT clock_timestamp(), '', '', 0, 'erased', :actor::text, concat_ws(': ', :reason::text, n || ' erased')
      FROM (SELECT count(*) AS n FROM erased) AS counted
     WHERE :audit::boolean AND n > 0
)
SELECT scope, key, state, has_data,
       CASE WHEN (scope, key) IN (SELECT scope, key FROM erased)
            THEN coalesce(semel_forget_answer(answer_day, token), true) ELSE false END
  FROM walked
 ORDER BY scope, key


-- name: erase_trail
-- Delete the lines of one owner, along the primary key, past each once. Those of an operation that has not ended stay with
-- it: a person may have to read them.
WITH walked AS MATERIALIZED (
    SELECT ctid AS place, scope, key, id,
           NOT EXISTS (SELECT FROM semel_keys AS record
                        WHERE record.scope = ANY (ARRAY[line.scope]) AND record.key = line.key
                          AND record.status IS NULL) AS may_go
      FROM semel_audit AS line
     WHERE (scope, key, id) > (:at_scope::text, :at_key::text, :at_id::bigint) AND scope < :end::text
     ORDER BY scope, key, id
     LIMIT :limit
), deleted AS (
    DELETE FROM semel_audit
     WHERE ctid = ANY (ARRAY(SELECT place FROM walked WHERE may_go AND NOT :is_preview::boolean))
 RETURNING 1
), noted AS (
    INSERT INTO semel_audit (at, scope, key, attempt, event, actor, detail)
    SELECT clock_timestamp(), '', '', 0, 'erased', :actor::text,
           concat_ws(': ', :reason::text, n || ' audit lines deleted')
      FROM (SELECT count(*) AS n FROM deleted) AS counted
     WHERE :audit::boolean AND n > 0
)
SELECT scope, key, id,
       CASE WHEN :is_preview::boolean THEN (SELECT count(*) FROM walked WHERE may_go)
            ELSE (SELECT count(*) FROM deleted) END
  FROM walked
 ORDER BY scope, key, id


-- name: discard
-- Forget a record that has not ended, because an operator says so.
WITH discarded AS (
    DELETE FROM semel_keys
     WHERE scope = :scope AND key = :key AND attempt = :attempt AND token = :token
       AND state IN ('pending', 'processing', 'unknown')
 RETURNING scope, key, attempt
), noted AS (
    INSERT INTO semel_audit (at, scope, key, attempt, event, actor)
    SELECT clock_timestamp(), scope, key, attempt, 'discarded', :actor::text
      FROM discarded
     WHERE :audit::boolean
)
SELECT 1 FROM discarded


-- name: unpark
-- Let a parked operation go on: an operator has said what its last effect did. The next request takes it over.
-- It counts as an attempt, the operator's; the completer, which gives up after so many tries, begins to count anew.
-- So does its retention, which may be long over.
WITH resolved AS (
    UPDATE semel_keys
       SET state = 'processing', attempt = attempt + 1, token = :no_token, lease_expires_at = clock_timestamp(),
           expires_at = clock_timestamp() + (expires_at - created_at), upkeep = 'open',
           tries = 0, steps = :steps, recovery_point = :recovery_point
     WHERE scope = :scope AND key = :key AND attempt = :attempt AND token = :token AND state = 'unknown'
 RETURNING scope, key, attempt
), noted AS (
    INSERT INTO semel_audit (at, scope, key, attempt, event, actor)
    SELECT clock_timestamp(), scope, key, attempt, 'resolved', :actor::text
      FROM resolved
     WHERE :audit::boolean
)
SELECT 1 FROM resolved


-- name: resolve
-- End a parked operation with the answer that an operator gives it. A token of no worker: its worker, should it wake, must not
-- take that answer for its own. It is kept for as long again as from its beginning.
WITH resolved AS (
    UPDATE semel_keys
       SET state = 'complete', status = :status, headers = :headers, body = :body, completed_at = clock_timestamp(),
           expires_at = clock_timestamp() + (expires_at - created_at),
           token = :no_token, request = NULL, request_body = NULL, upkeep = NULL
     WHERE scope = :scope AND key = :key AND attempt = :attempt AND token = :token AND state = 'unknown'
 RETURNING scope, key, attempt
), noted AS (
    INSERT INTO semel_audit (at, scope, key, attempt, event, actor)
    SELECT clock_timestamp(), scope, key, attempt, 'resolved', :actor::text
      FROM resolved
     WHERE :audit::boolean
)
SELECT 1 FROM resolved


-- name: note
-- A line of the audit trail that no other statement writes.
INSERT INTO semel_audit (at, scope, key, attempt, event, actor, detail)
SELECT clock_timestamp(), :scope, :key, :attempt, :event, :actor, :detail
 WHERE :audit::boolean
RETURNING 1


-- name: read_trail
-- What the audit trail has of one key, oldest first.
SELECT at, scope, key, attempt, event, actor, detail
  FROM semel_audit
 WHERE scope = :scope AND key = :key
 ORDER BY id
 LIMIT :limit


-- name: now
-- The only clock that decides.
SELECT clock_timestamp()


-- name: check
-- Whether this server can serve: it has the table with the newest of the columns that requests name, and it takes writes.
-- No row is read: the first one that is not dead may be far.
SELECT pg_is_in_recovery() OR current_setting('transaction_read_only')::bool,
       EXISTS (SELECT upkeep, traceparent, answer_day FROM semel_keys WHERE false),
       CAST('semel_audit' AS regclass) IS NOT NULL


-- name: privileges
-- What the role of this session lacks of what the statements of a request need. All of them name the audit trail, even
-- where none is kept. A table that is not there is told by others; semel_answers is in the partitioned layout only.
SELECT current_user, wanted.name, wanted.privilege
  FROM (VALUES ('semel_keys', 'SELECT'), ('semel_keys', 'INSERT'), ('semel_keys', 'UPDATE'), ('semel_keys', 'DELETE'),
               ('semel_audit', 'INSERT'), ('semel_answers', 'SELECT')) AS wanted (name, privilege)
 WHERE CASE wanted.privilege WHEN 'DELETE' THEN NOT has_table_privilege(to_regclass(wanted.name), wanted.privilege)
            ELSE NOT has_any_column_privilege(to_regclass(wanted.name), wanted.privilege) END
