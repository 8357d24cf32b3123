-- The statements of the PostgreSQL store. Each is one round trip and its own transaction, but for those that join the
-- application's: lock, peek, begin, probe, finish, replace and save. They run on any driver, so their casts are spelled
-- CAST and nothing in them is a percent sign or a stray colon.
-- Only the server's clock decides, and it is clock_timestamp(): now() stands still within a transaction.
-- Plural parameters are arrays: one statement serves everybody who asked meanwhile.
-- What is about one record finds it by its primary key, and says state || '' = 'processing' where it means that state:
-- said plainly, the planner may look in semel_keys_in_progress instead, because there seem to be few rows in it. But it
-- has an entry for every operation that ended since the last vacuum, and each of them would be read.
-- Where a statement joins many keys to the table, it says scope = ANY (ARRAY[asked.scope]): that is looked up for each
-- key, and can't be done by walking along the whole primary key, which a plan that was made for a small table does for
-- as long as the session keeps the plan.
-- What changes a record writes a line of the audit trail in the same statement; :audit says whether there is one.
--
-- A worker's process may hold a lock while it lives, exclusively, in a session of its own; the records that it works on
-- bear the lock's number as their owner. Whoever gets that lock, shared, has proof that the process is dead, and need
-- not wait for the lease. It is tried only where the lease is not over, and only by those who hold such a lock
-- themselves (:tests_owner); shared, so that several may find out at once; until the transaction ends, which frees it.
-- What is claimed bears the number of the claimant's own lock, :owner, only if that can't be had: then it is held, and
-- on this very server. A claim must not bear the number of a lock that was lost, or is another server's.
--
-- pg_notify stands in a CASE of its own: a transaction that notifies anybody waits for a lock of the whole database at
-- COMMIT, so none does unless somebody has asked for it.


-- name: claim
-- Take the keys that nobody has; say of the others what is there.
-- DO NOTHING, not DO UPDATE: a replay then writes no row version and no WAL.
-- ORDER BY, because two processes that insert the same keys in different orders deadlock.
-- The read sees the table as it was before the insert. So a key that a rival took in between comes back
-- in neither part, and its caller asks again.
-- OFFSET 0 makes the planner look each key up by itself, through the primary key.
-- A key that tells when it was made needs no tombstone: by its age it is refused. But only one that was made before
-- now by this clock; its client's may be ahead.
WITH asked AS (
    SELECT *
      FROM unnest(:scopes::text[], :keys::text[], :tokens::bytea[], :fingerprints::bytea[],
                  :leases::float8[], :retentions::float8[],
                  :on_crashes::text[], :after_retentions::text[], :requests::text[], :request_bodies::bytea[],
                  :accepteds::boolean[], :made_ats::float8[])
        AS asked (scope, key, token, fingerprint, lease, retention, on_crash, after_retention, request, request_body,
                  accepted, made_at)
), won AS (
    INSERT INTO semel_keys (scope, key, state, attempt, token, fingerprint, created_at, lease_expires_at, expires_at,
                            on_crash, after_retention, request, request_body, accepted, owner)
    SELECT scope, key, CASE WHEN accepted THEN 'pending' ELSE 'processing' END, 1, token, fingerprint,
           clock_timestamp(), CASE WHEN NOT accepted THEN clock_timestamp() + lease * interval '1 second' END,
           clock_timestamp() + retention * interval '1 second',
           on_crash, CASE WHEN after_retention = 'strip' AND to_timestamp(made_at) <= clock_timestamp() THEN 'delete'
                          ELSE after_retention END,
           request, request_body, accepted,
           CASE WHEN NOT accepted
                THEN (SELECT :owner::bigint WHERE NOT pg_try_advisory_xact_lock_shared(:owner::bigint)) END
      FROM asked
     ORDER BY scope COLLATE "C", key COLLATE "C"
        ON CONFLICT (scope, key) DO NOTHING
 RETURNING scope, key, accepted
), noted AS (
    INSERT INTO semel_audit (at, scope, key, attempt, event, actor)
    SELECT clock_timestamp(), scope, key, 1, CASE WHEN accepted THEN 'accepted' ELSE 'claimed' END, :actor::text
      FROM won
     WHERE :audit::boolean
)
SELECT scope, key, NULL AS state, 1 AS attempt, NULL::bytea AS token, NULL::bytea AS fingerprint,
       NULL::smallint AS status, NULL AS headers, NULL::bytea AS body, false AS lease_is_over,
       0::float8 AS retention_left, NULL AS steps, accepted
  FROM won
 WHERE CASE WHEN accepted THEN pg_notify(:channel, 'accepted') IS NOT NULL ELSE true END
 UNION ALL
SELECT found.*
  FROM asked
 CROSS JOIN LATERAL (
    SELECT scope, key, state, attempt, token, fingerprint, status, headers, body,
           CASE WHEN lease_expires_at IS NULL OR lease_expires_at <= clock_timestamp() THEN true
                WHEN owner IS NOT NULL AND :tests_owner::boolean THEN pg_try_advisory_xact_lock_shared(owner)
                ELSE false END,
           date_part('epoch', expires_at - clock_timestamp()), steps, accepted
      FROM semel_keys
     WHERE semel_keys.scope = asked.scope AND semel_keys.key = asked.key
    OFFSET 0
 ) AS found


-- name: take_over
-- Take the key from a worker whose lease ran out, or from a record that expired, if it is still the one that was seen.
-- A record that expired starts anew. One that did not stays the same operation: it keeps its age, its fingerprint,
-- its steps and its request. One that is pending is begun, by a worker alone, and that is its first attempt still.
-- What is unknown never expires: an operator has to say what it did.
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
           tries            = CASE WHEN expires_at <= clock.now THEN 0
                                   WHEN :is_abandoned::boolean THEN tries + 1 ELSE tries END,
           created_at       = CASE WHEN expires_at <= clock.now THEN clock.now ELSE created_at END,
           expires_at       = CASE WHEN expires_at <= clock.now THEN clock.now + :retention * interval '1 second'
                                   ELSE expires_at END
      FROM (SELECT clock_timestamp() AS now) AS clock
     WHERE scope = :scope AND key = :key AND attempt = :seen_attempt AND token = :seen_token
       AND NOT (:is_abandoned::boolean AND expires_at <= clock.now)
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
     WHERE :audit::boolean
)
SELECT attempt
  FROM taken
 WHERE CASE WHEN state = 'pending' THEN pg_notify(:channel, 'accepted') IS NOT NULL ELSE true END


-- name: complete
-- Store how each operation ended. Only the attempt that holds the key may, and it proves it by its token.
-- The request is needed no more; the steps stay, for people to look at. Where there is a hint, those who listen get it.
WITH ended AS (
    UPDATE semel_keys
       SET state = asked.state, status = asked.status, headers = asked.headers, body = asked.body,
           completed_at = clock_timestamp(), lease_expires_at = NULL, owner = NULL, request = NULL, request_body = NULL
      FROM unnest(:scopes::text[], :keys::text[], :attempts::int[], :tokens::bytea[],
                  :states::text[], :statuses::smallint[], :headers::text[], :bodies::bytea[], :hints::text[])
        AS asked (scope, key, attempt, token, state, status, headers, body, hint)
     WHERE semel_keys.scope = ANY (ARRAY[asked.scope]) AND semel_keys.key = asked.key
       AND semel_keys.attempt = asked.attempt AND semel_keys.token = asked.token
       AND semel_keys.state || '' = 'processing'
 RETURNING semel_keys.scope, semel_keys.key, semel_keys.attempt, semel_keys.token, semel_keys.state, asked.hint
), noted AS (
    INSERT INTO semel_audit (at, scope, key, attempt, event, actor)
    SELECT clock_timestamp(), scope, key, attempt, CASE state WHEN 'complete' THEN 'completed' ELSE 'failed' END,
           :actor::text
      FROM ended
     WHERE :audit::boolean
)
SELECT scope, key, attempt, token
  FROM ended
 WHERE CASE WHEN hint IS NULL THEN true ELSE pg_notify(:channel, hint) IS NOT NULL END


-- name: completed
-- Say whether this very attempt has stored its answer: the reply to its statement may have been lost.
SELECT true
  FROM semel_keys
 WHERE scope = :scope AND key = :key AND attempt = :attempt AND token = :token AND state IN ('complete', 'failed')


-- name: release
-- Free the key, if this attempt still holds it; attempt 0 stands for whatever number its token was given.
-- An earlier attempt may have had its effect, and a step that was saved has had its own; and one that was accepted is
-- promised to be run, once a worker has begun it. Then the record stays: nobody's, and to be taken over at once.
-- Returns whether somebody else's record is in the way.
WITH freed AS (
    DELETE FROM semel_keys
     WHERE scope = :scope AND key = :key AND token = :token AND :attempt::int IN (0, attempt)
       AND (state || '' = 'pending' OR (state || '' = 'processing' AND attempt = 1 AND steps IS NULL AND NOT accepted))
 RETURNING scope, key, attempt, 'released' AS event
), given_up AS (
    UPDATE semel_keys
       SET token = :nobodys_token, lease_expires_at = clock_timestamp(), owner = NULL
     WHERE scope = :scope AND key = :key AND token = :token AND :attempt::int IN (0, attempt)
       AND state || '' = 'processing' AND (attempt > 1 OR steps IS NOT NULL OR accepted)
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
-- Prolong every lease this process holds; return the keys it has lost. One whose owner is dead is lost, though nobody
-- has taken it yet: it was claimed just before its process lost its lock, and not known to anybody who could be told.
-- SKIP LOCKED: whoever has the row locked is completing it, and a deadlock with them is not worth a renewal.
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
           AND attempt = asked.attempt AND token = asked.token AND state || '' = 'processing'
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
       AND attempt = asked.attempt AND token = asked.token AND state || '' = 'processing'
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
       AND attempt = CAST(:attempt AS integer) AND token = CAST(:token AS bytea) AND state || '' = 'processing'
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
 WHERE scope = :scope AND key = :key AND attempt = :attempt AND token = :token AND state || '' = 'processing'
RETURNING 1


-- name: lock
-- Try to take the locks of a request and of its key until the transaction ends, and keep in a setting of the transaction
-- which of them it has, for the next statement. It is sent together with BEGIN and peek.
-- The request's own lock comes first, and the key's only with it. So a request that fails at the first knows that the
-- request which runs is the same, and one that fails at the second, that it is another.
-- The locks' numbers come as text, because some drivers take every number for one of 32 bits.
SELECT set_config('semel.holder',
                  CASE WHEN pg_try_advisory_xact_lock(CAST(CAST(:request_lock AS text) AS bigint))
                       THEN CASE WHEN pg_try_advisory_xact_lock(CAST(CAST(:key_lock AS text) AS bigint))
                                 THEN 'mine' ELSE 'other' END
                       ELSE 'same' END,
                  true)


-- name: peek
-- Bring no row where the handler can be run: the locks are ours, there is no record, and one could be written at the
-- end; else begin tells why not. A driver that reads no rows of what it sends with BEGIN still learns their number.
-- It is a statement of its own after lock, so that it sees whatever was committed before the locks were free.
SELECT 1
 WHERE current_setting('semel.holder') <> 'mine'
    OR current_setting('transaction_isolation') IN ('repeatable read', 'serializable')
    OR CAST(current_setting('transaction_read_only') AS boolean)
    OR NOT (has_any_column_privilege(CAST('semel_keys' AS regclass), 'SELECT')
            AND has_any_column_privilege(CAST('semel_keys' AS regclass), 'INSERT')
            AND has_any_column_privilege(CAST('semel_keys' AS regclass), 'UPDATE')
            AND has_any_column_privilege(CAST('semel_audit' AS regclass), 'INSERT'))
    OR EXISTS (SELECT FROM semel_keys WHERE scope = CAST(:scope AS text) AND key = CAST(:key AS text))


-- name: begin
-- Try to take the locks, as lock does, and read what is there in any case: a finished record is the answer, whichever
-- transaction has the locks.
-- The read sees the table as it was before this statement took a lock. So it runs again once it has them, where it has
-- found nothing final.
-- It also says whether the record could be written at the end: not by a transaction that is read-only (a replica; a
-- server, a database or a role that was made so), nor by a role that lacks a privilege.
WITH lock AS MATERIALIZED (
    SELECT CASE WHEN pg_try_advisory_xact_lock(CAST(CAST(:request_lock AS text) AS bigint))
                THEN CASE WHEN pg_try_advisory_xact_lock(CAST(CAST(:key_lock AS text) AS bigint))
                          THEN 'mine' ELSE 'other' END
                ELSE 'same' END AS holder
)
SELECT lock.holder, CAST(current_setting('transaction_read_only') AS boolean) AS is_read_only,
       CASE WHEN NOT (has_any_column_privilege(CAST('semel_keys' AS regclass), 'SELECT')
                      AND has_any_column_privilege(CAST('semel_keys' AS regclass), 'INSERT')
                      AND has_any_column_privilege(CAST('semel_keys' AS regclass), 'UPDATE')
                      AND has_any_column_privilege(CAST('semel_audit' AS regclass), 'INSERT'))
            THEN CAST(current_user AS text) END AS powerless_role,
       current_setting('transaction_isolation') IN ('repeatable read', 'serializable') AS keeps_snapshot, found.*
  FROM lock
  LEFT JOIN (
    SELECT state, attempt, token, fingerprint, status, headers, body,
           CASE WHEN lease_expires_at IS NULL OR lease_expires_at <= clock_timestamp() THEN true
                WHEN owner IS NOT NULL AND CAST(:tests_owner AS boolean) THEN pg_try_advisory_xact_lock_shared(owner)
                ELSE false END,
           date_part('epoch', expires_at - clock_timestamp()), steps, accepted
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
INSERT INTO semel_keys (scope, key, state, attempt, token, fingerprint, status, headers, body,
                        created_at, completed_at, expires_at, on_crash, after_retention)
SELECT CAST(:scope AS text), CAST(:key AS text), CAST(:state AS text), CAST(:attempt AS integer),
       CAST(:token AS bytea), CAST(:fingerprint AS bytea),
       CAST(:status AS smallint), CAST(:headers AS text), CAST(:body AS bytea),
       clock.now, clock.now, clock.now + CAST(:retention AS float8) * interval '1 second',
       CAST(:on_crash AS text),
       CASE WHEN CAST(:after_retention AS text) = 'strip' AND to_timestamp(CAST(:made_at AS float8)) <= clock.now
            THEN 'delete' ELSE CAST(:after_retention AS text) END
  FROM (SELECT clock_timestamp() AS now) AS clock
 WHERE CASE WHEN CAST(:hint AS text) IS NULL THEN true
            ELSE pg_notify(CAST(:channel AS text), CAST(:hint AS text)) IS NOT NULL END


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
           completed_at     = clock.now,
           lease_expires_at = NULL,
           owner            = NULL,
           accepted         = CASE WHEN old.expires_at <= clock.now THEN false ELSE old.accepted END,
           milestone        = CASE WHEN old.expires_at <= clock.now THEN NULL ELSE old.milestone END,
           request          = NULL,
           request_body     = NULL,
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
SELECT scope, key, state, attempt, token, fingerprint, recovery_point, steps, status, headers, body, body IS NULL,
       accepted, milestone, created_at, lease_expires_at, completed_at, expires_at, clock_timestamp()
  FROM semel_keys
 WHERE scope = :scope AND key = :key
   FOR UPDATE


-- name: park
-- Stop an operation until an operator has said what it did. Its worker may ask for it, and may ask twice; or, once that
-- is silent, others: of several that ask at once, one is told that it did. A pending one has no worker yet.
WITH parked AS (
    UPDATE semel_keys
       SET state = 'unknown', lease_expires_at = NULL, owner = NULL
     WHERE scope = :scope AND key = :key AND attempt = :attempt AND token = :token
       AND state || '' IN ('pending', 'processing')
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
 WHERE scope = :scope AND key = :key AND attempt = :attempt AND token = :token AND state || '' = 'unknown'
   AND NOT :if_silent::boolean


-- name: look
-- One record, whole.
SELECT scope, key, state, attempt, token, fingerprint, recovery_point, steps, status, headers, body, body IS NULL,
       accepted, milestone, created_at, lease_expires_at, completed_at, expires_at, clock_timestamp()
  FROM semel_keys
 WHERE scope = :scope AND key = :key


-- name: browse
-- The newest records, without their bodies.
SELECT scope, key, state, attempt, token, fingerprint, recovery_point, steps, status, headers, ''::bytea, body IS NULL,
       accepted, milestone, created_at, lease_expires_at, completed_at, expires_at, clock_timestamp()
  FROM semel_keys
 WHERE (:scope::text IS NULL OR scope = :scope)
   AND (:key::text IS NULL OR key = :key)
   AND (:state::text IS NULL OR state = :state)
   AND (:digest::text IS NULL OR starts_with(encode(sha256(convert_to(key, 'UTF8')), 'hex'), :digest))
 ORDER BY created_at DESC
 LIMIT :limit


-- name: find_stuck
-- The records whose worker is silent past its lease, or dead; and those that wait for their first worker, by their age.
-- Scopes take turns, and of each scope the longest silent comes first. Past its retention it is the reaper's.
-- When a process died is not known: it counts as silent from now on, and not before.
-- MATERIALIZED: the clock is read once, so that who is silent for longer comes first.
-- At most :window are looked at from the oldest on, along the index on what is in progress, and as many from some moment
-- on: one scope that has more than that to do can't hide for long what others have behind it.
-- The rest of a record is read when it is chosen, at its place (ctid), which stays the same within a statement.
-- What is due after its pause is said in words of its own in core/upkeep.py.
WITH clock AS MATERIALIZED (
    SELECT clock_timestamp() AS now
), oldest AS MATERIALIZED (
    SELECT created_at
      FROM semel_keys
     WHERE state IN ('pending', 'processing')
     ORDER BY created_at
     LIMIT 1
), start AS MATERIALIZED (
    SELECT created_at AS at FROM oldest
     UNION ALL
    SELECT created_at + random() * (clock.now - created_at) FROM oldest, clock
), due AS MATERIALIZED (
    SELECT DISTINCT found.place, found.scope, found.silent_since
      FROM start, clock
     CROSS JOIN LATERAL (
        SELECT ctid AS place, scope, least(coalesce(lease_expires_at, created_at), clock.now) AS silent_since
          FROM semel_keys
         WHERE state IN ('pending', 'processing', 'unknown') AND created_at >= start.at
           AND (state = 'processing' OR (state = 'pending' AND :with_pending::boolean)) AND expires_at > clock.now
           AND (:with_nobodys::boolean OR token <> :nobodys_token)
           AND (NOT :with_request::boolean OR request IS NOT NULL)
           AND CASE WHEN lease_expires_at IS NULL OR lease_expires_at <= clock.now THEN true
                    WHEN owner IS NOT NULL AND :tests_owner::boolean THEN pg_try_advisory_xact_lock_shared(owner)
                    ELSE false END
           AND (NOT :only_due::boolean
                OR (accepted AND (tries = 0 OR token <> :nobodys_token))
                OR clock.now - least(coalesce(lease_expires_at, created_at), clock.now)
                   >= make_interval(secs => :first_pause::float8)
                      * (1 << least(tries - accepted::integer, :most_doublings::integer)))
         ORDER BY created_at
         LIMIT :window
     ) AS found
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
-- Free the key of a worker that is silent past its lease, or dead. The record stays, and whoever comes next takes it
-- over: nobody holds it any more, so its lease is over now, if it was not.
WITH swept AS (
    UPDATE semel_keys
       SET token = :nobodys_token, lease_expires_at = least(lease_expires_at, clock_timestamp()), owner = NULL
     WHERE scope = :scope AND key = :key AND attempt = :attempt AND token = :token AND state || '' = 'processing'
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


-- name: reap
-- Clear away what is past its retention, the oldest first: delete it; or leave a tombstone where a late retry is to be
-- refused; or, where nobody ended it and nobody holds it, say that it failed. That one is deleted another time.
-- (SELECT clock_timestamp()), because a volatile function can't be looked up in an index.
-- SKIP LOCKED: several may reap at once, and nobody's record is waited for. A row that is locked stays where it is,
-- so that it is found again by its place (ctid) and not by its key.
-- Nobody's token: the silent worker, should it wake, must not take the answer for its own.
WITH ended AS (
    SELECT ctid AS place, after_retention AS fate, expires_at
      FROM semel_keys
     WHERE state IN ('complete', 'failed') AND after_retention <> 'keep'
       AND expires_at <= (SELECT clock_timestamp())
     ORDER BY expires_at
     LIMIT :limit
       FOR UPDATE SKIP LOCKED
), left_behind AS (
    SELECT ctid AS place, 'fail' AS fate, expires_at
      FROM semel_keys
     WHERE state IN ('pending', 'processing')
       AND expires_at <= (SELECT clock_timestamp())
       AND (state = 'pending' OR lease_expires_at <= (SELECT clock_timestamp()))
     ORDER BY expires_at
     LIMIT :limit
       FOR UPDATE SKIP LOCKED
), due AS (
    SELECT * FROM ended UNION ALL SELECT * FROM left_behind ORDER BY expires_at LIMIT :limit
), deleted AS (
    DELETE FROM semel_keys
     WHERE ctid = ANY (ARRAY(SELECT place FROM due WHERE fate = 'delete'))
 RETURNING scope, key, attempt, 'reaped' AS event
), stripped AS (
    UPDATE semel_keys
       SET headers = '[]', body = NULL, steps = NULL, recovery_point = NULL, after_retention = 'keep'
     WHERE ctid = ANY (ARRAY(SELECT place FROM due WHERE fate = 'strip'))
 RETURNING scope, key, attempt, 'stripped' AS event
), failed AS (
    UPDATE semel_keys
       SET state = 'failed', status = :status, headers = :headers, body = :body, completed_at = clock_timestamp(),
           token = :nobodys_token, lease_expires_at = NULL, owner = NULL, request = NULL, request_body = NULL
     WHERE ctid = ANY (ARRAY(SELECT place FROM due WHERE fate = 'fail'))
 RETURNING scope, key, attempt, 'abandoned' AS event
), noted AS (
    INSERT INTO semel_audit (at, scope, key, attempt, event, actor)
    SELECT clock_timestamp(), scope, key, attempt, event, :actor::text
      FROM (SELECT * FROM deleted UNION ALL SELECT * FROM stripped UNION ALL SELECT * FROM failed) AS reaped
     WHERE :audit::boolean
)
SELECT (SELECT count(*) FROM deleted), (SELECT count(*) FROM stripped), (SELECT count(*) FROM failed)


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


-- name: discard
-- Forget a record that has not ended, because an operator says so.
WITH discarded AS (
    DELETE FROM semel_keys
     WHERE scope = :scope AND key = :key AND attempt = :attempt AND token = :token
       AND state || '' IN ('pending', 'processing', 'unknown')
 RETURNING scope, key, attempt
), noted AS (
    INSERT INTO semel_audit (at, scope, key, attempt, event, actor)
    SELECT clock_timestamp(), scope, key, attempt, 'discarded', :actor::text
      FROM discarded
     WHERE :audit::boolean
)
SELECT 1 FROM discarded


-- name: unpark
-- Let a parked operation go on: an operator has said what its last effect did. Whoever comes next takes it over.
-- It counts as an attempt, the operator's; the completer, which gives up after so many tries, begins to count anew.
-- So does its retention, which may be long over.
WITH resolved AS (
    UPDATE semel_keys
       SET state = 'processing', attempt = attempt + 1, token = :nobodys_token, lease_expires_at = clock_timestamp(),
           expires_at = clock_timestamp() + (expires_at - created_at),
           tries = 0, steps = :steps, recovery_point = :recovery_point
     WHERE scope = :scope AND key = :key AND attempt = :attempt AND token = :token AND state || '' = 'unknown'
 RETURNING scope, key, attempt
), noted AS (
    INSERT INTO semel_audit (at, scope, key, attempt, event, actor)
    SELECT clock_timestamp(), scope, key, attempt, 'resolved', :actor::text
      FROM resolved
     WHERE :audit::boolean
)
SELECT 1 FROM resolved


-- name: decree
-- End a parked operation with the answer that an operator gives it. Nobody's token: its worker, should it wake, must not
-- take that answer for its own. It is kept for as long again as from its beginning.
WITH resolved AS (
    UPDATE semel_keys
       SET state = 'complete', status = :status, headers = :headers, body = :body, completed_at = clock_timestamp(),
           expires_at = clock_timestamp() + (expires_at - created_at),
           token = :nobodys_token, request = NULL, request_body = NULL
     WHERE scope = :scope AND key = :key AND attempt = :attempt AND token = :token AND state || '' = 'unknown'
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
-- Whether this server can serve: it has the table, and it takes writes.
SELECT pg_is_in_recovery() OR current_setting('transaction_read_only')::bool, EXISTS (SELECT owner FROM semel_keys),
       CAST('semel_audit' AS regclass) IS NOT NULL


-- name: privileges
-- What the role of this session lacks of what the statements of a request need. All of them name the audit trail, even
-- where none is kept. A table that is not there is told by others.
SELECT current_user, wanted.name, wanted.privilege
  FROM (VALUES ('semel_keys', 'SELECT'), ('semel_keys', 'INSERT'), ('semel_keys', 'UPDATE'), ('semel_keys', 'DELETE'),
               ('semel_audit', 'INSERT')) AS wanted (name, privilege)
 WHERE CASE wanted.privilege WHEN 'DELETE' THEN NOT has_table_privilege(to_regclass(wanted.name), wanted.privilege)
            ELSE NOT has_any_column_privilege(to_regclass(wanted.name), wanted.privilege) END
