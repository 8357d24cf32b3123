-- The statements of the PostgreSQL store. Each is one round trip and its own transaction.
-- Only the server's clock decides, and it is clock_timestamp(): now() stands still within a transaction.
-- Plural parameters are arrays: one statement serves everybody who asked meanwhile.


-- name: claim
-- Take the keys that nobody has; say of the others what is there.
-- DO NOTHING, not DO UPDATE: a replay then writes no row version and no WAL.
-- ORDER BY, because two processes that insert the same keys in different orders deadlock.
-- The read sees the table as it was before the insert. So a key that a rival took in between comes back
-- in neither part, and its caller asks again.
-- OFFSET 0 makes the planner look each key up by itself, through the primary key.
WITH asked AS (
    SELECT *
      FROM unnest(:scopes::text[], :keys::text[], :tokens::bytea[], :fingerprints::bytea[],
                  :leases::float8[], :retentions::float8[])
        AS asked (scope, key, token, fingerprint, lease, retention)
), won AS (
    INSERT INTO semel_keys (scope, key, state, attempt, token, fingerprint, created_at, lease_expires_at, expires_at)
    SELECT scope, key, 'processing', 1, token, fingerprint, clock_timestamp(),
           clock_timestamp() + lease * interval '1 second', clock_timestamp() + retention * interval '1 second'
      FROM asked
     ORDER BY scope COLLATE "C", key COLLATE "C"
        ON CONFLICT (scope, key) DO NOTHING
 RETURNING scope, key
)
SELECT scope, key, NULL AS state, 1 AS attempt, NULL::bytea AS token, NULL::bytea AS fingerprint,
       NULL::smallint AS status, NULL AS headers, NULL::bytea AS body, false AS lease_is_over, false AS is_expired
  FROM won
 UNION ALL
SELECT found.*
  FROM asked
 CROSS JOIN LATERAL (
    SELECT scope, key, state, attempt, token, fingerprint, status, headers, body,
           coalesce(lease_expires_at <= clock_timestamp(), true), expires_at <= clock_timestamp()
      FROM semel_keys
     WHERE semel_keys.scope = asked.scope AND semel_keys.key = asked.key
    OFFSET 0
 ) AS found


-- name: take_over
-- Take the key from a worker whose lease ran out, or from a record that expired, if it is still the one that was seen.
-- A record that expired starts anew. One that did not stays the same operation: it keeps its age and its fingerprint.
UPDATE semel_keys
   SET state            = 'processing',
       attempt          = CASE WHEN expires_at <= clock.now THEN 1 ELSE attempt + 1 END,
       token            = :token,
       lease_expires_at = clock.now + :lease * interval '1 second',
       status           = NULL,
       headers          = NULL,
       body             = NULL,
       completed_at     = NULL,
       recovery_point   = CASE WHEN expires_at <= clock.now THEN NULL ELSE recovery_point END,
       fingerprint      = CASE WHEN expires_at <= clock.now THEN :fingerprint ELSE fingerprint END,
       created_at       = CASE WHEN expires_at <= clock.now THEN clock.now ELSE created_at END,
       expires_at       = CASE WHEN expires_at <= clock.now THEN clock.now + :retention * interval '1 second'
                               ELSE expires_at END
  FROM (SELECT clock_timestamp() AS now) AS clock
 WHERE scope = :scope AND key = :key AND attempt = :seen_attempt AND token = :seen_token
   AND CASE WHEN state IN ('complete', 'failed') THEN expires_at <= clock.now
            ELSE lease_expires_at <= clock.now END
RETURNING attempt


-- name: complete
-- Store how each operation ended. Only the attempt that holds the key may, and it proves it by its token.
UPDATE semel_keys
   SET state = asked.state, status = asked.status, headers = asked.headers, body = asked.body,
       completed_at = clock_timestamp(), lease_expires_at = NULL
  FROM unnest(:scopes::text[], :keys::text[], :attempts::int[], :tokens::bytea[],
              :states::text[], :statuses::smallint[], :headers::text[], :bodies::bytea[])
    AS asked (scope, key, attempt, token, state, status, headers, body)
 WHERE semel_keys.scope = asked.scope AND semel_keys.key = asked.key
   AND semel_keys.attempt = asked.attempt AND semel_keys.token = asked.token AND semel_keys.state = 'processing'
RETURNING semel_keys.scope, semel_keys.key, semel_keys.attempt, semel_keys.token


-- name: completed
-- Say whether this very attempt has stored its answer: the reply to its statement may have been lost.
SELECT true
  FROM semel_keys
 WHERE scope = :scope AND key = :key AND attempt = :attempt AND token = :token AND state IN ('complete', 'failed')


-- name: release
-- Free the key, if this attempt still holds it; attempt 0 stands for whatever number its token was given.
-- An earlier attempt may have had its effect. Then the record stays: nobody's, and to be taken over at once.
-- Returns whether somebody else's record is in the way.
WITH freed AS (
    DELETE FROM semel_keys
     WHERE scope = :scope AND key = :key AND token = :token AND :attempt::int IN (0, attempt) AND state = 'processing'
       AND attempt = 1
 RETURNING 1
), given_up AS (
    UPDATE semel_keys
       SET token = :nobodys_token, lease_expires_at = clock_timestamp()
     WHERE scope = :scope AND key = :key AND token = :token AND :attempt::int IN (0, attempt) AND state = 'processing'
       AND attempt > 1
 RETURNING 1
)
SELECT EXISTS (SELECT FROM semel_keys WHERE scope = :scope AND key = :key)
       AND NOT EXISTS (SELECT FROM freed) AND NOT EXISTS (SELECT FROM given_up)


-- name: renew
-- Prolong every lease this process holds; return the keys it has lost.
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
           AND attempt = asked.attempt AND token = asked.token AND state = 'processing'
           FOR UPDATE SKIP LOCKED
     ) AS locked
), renewed AS (
    UPDATE semel_keys
       SET lease_expires_at = clock_timestamp() + mine.lease * interval '1 second'
      FROM mine
     WHERE semel_keys.scope = mine.scope AND semel_keys.key = mine.key
)
SELECT scope, key, attempt, token
  FROM asked
 WHERE NOT EXISTS (
    SELECT
      FROM semel_keys
     WHERE scope = asked.scope AND key = asked.key
       AND attempt = asked.attempt AND token = asked.token AND state = 'processing'
 )


-- name: look
-- One record, whole.
SELECT scope, key, state, attempt, token, fingerprint, recovery_point, status, headers, body, body IS NULL,
       created_at, lease_expires_at, completed_at, expires_at, clock_timestamp()
  FROM semel_keys
 WHERE scope = :scope AND key = :key


-- name: browse
-- The newest records, without their bodies.
SELECT scope, key, state, attempt, token, fingerprint, recovery_point, status, headers, ''::bytea, body IS NULL,
       created_at, lease_expires_at, completed_at, expires_at, clock_timestamp()
  FROM semel_keys
 WHERE (:scope::text IS NULL OR scope = :scope)
   AND (:key::text IS NULL OR key = :key)
   AND (:state::text IS NULL OR state = :state)
 ORDER BY created_at DESC
 LIMIT :limit


-- name: now
-- The only clock that decides.
SELECT clock_timestamp()


-- name: check
-- Whether this server can serve: it has the table, and it takes writes.
SELECT pg_is_in_recovery() OR current_setting('transaction_read_only')::bool, EXISTS (SELECT FROM semel_keys)
