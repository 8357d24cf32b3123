-- What is said to PostgreSQL about the endpoints of webhooks, each in a transaction of its own.
-- Only the server's clock tells the time. A row of an endpoint is always the same columns, in the order of "find".

-- name: add
-- A new endpoint. No row comes back if there is one of this name.
INSERT INTO semel_webhooks (name, url, secrets)
VALUES (CAST(:name AS text), CAST(:url AS text), CAST(:secrets AS text))
ON CONFLICT (name) DO NOTHING
RETURNING name, url, secrets, state, reason, CAST(extract(epoch FROM failing_since) AS double precision),
          CAST(extract(epoch FROM created_at) AS double precision),
          CAST(extract(epoch FROM clock_timestamp()) AS double precision)


-- name: replace
-- An endpoint of this name has another URL, or other secrets. Its failures were those of what was there before.
INSERT INTO semel_webhooks (name, url, secrets)
VALUES (CAST(:name AS text), CAST(:url AS text), CAST(:secrets AS text))
ON CONFLICT (name) DO UPDATE
   SET url = excluded.url, secrets = excluded.secrets, failing_since = NULL, changed_at = clock_timestamp()
RETURNING name, url, secrets, state, reason, CAST(extract(epoch FROM failing_since) AS double precision),
          CAST(extract(epoch FROM created_at) AS double precision),
          CAST(extract(epoch FROM clock_timestamp()) AS double precision)


-- name: list
-- All of them, by name.
SELECT name, url, secrets, state, reason, CAST(extract(epoch FROM failing_since) AS double precision),
       CAST(extract(epoch FROM created_at) AS double precision),
       CAST(extract(epoch FROM clock_timestamp()) AS double precision)
  FROM semel_webhooks
 ORDER BY name


-- name: enable
-- Send to it again. It has as long to fail as a new one. With :was, only if its state and reason are still those.
UPDATE semel_webhooks
   SET state = 'on', reason = NULL, failing_since = NULL, changed_at = clock_timestamp()
 WHERE name = CAST(:name AS text) AND url = coalesce(CAST(:url AS text), url)
   AND (CAST(:was AS text) IS NULL OR (state = CAST(:was AS text) AND coalesce(reason, '') = CAST(:why AS text)))
RETURNING name, url, secrets, state, reason, CAST(extract(epoch FROM failing_since) AS double precision),
          CAST(extract(epoch FROM created_at) AS double precision),
          CAST(extract(epoch FROM clock_timestamp()) AS double precision)


-- name: disable
-- Send nothing more to it. A relay names the URL that it has sent to: the operator may have given another meanwhile.
UPDATE semel_webhooks
   SET state = 'off', reason = CAST(:reason AS text), changed_at = clock_timestamp()
 WHERE name = CAST(:name AS text) AND url = coalesce(CAST(:url AS text), url)
   AND (CAST(:was AS text) IS NULL OR (state = CAST(:was AS text) AND coalesce(reason, '') = CAST(:why AS text)))
RETURNING name, url, secrets, state, reason, CAST(extract(epoch FROM failing_since) AS double precision),
          CAST(extract(epoch FROM created_at) AS double precision),
          CAST(extract(epoch FROM clock_timestamp()) AS double precision)


-- name: remove
-- Forget it. Its messages stay in the outbox.
DELETE FROM semel_webhooks
 WHERE name = CAST(:name AS text)
RETURNING name, url, secrets, state, reason, CAST(extract(epoch FROM failing_since) AS double precision),
          CAST(extract(epoch FROM created_at) AS double precision),
          CAST(extract(epoch FROM clock_timestamp()) AS double precision)


-- name: note_failure
-- It has failed. The first failure after a success is remembered, and the one that comes too long after it turns the
-- endpoint off.
UPDATE semel_webhooks
   SET failing_since = coalesce(failing_since, clock_timestamp()), changed_at = clock_timestamp(),
       state = CASE WHEN failing_since <= clock_timestamp() - CAST(:patience AS double precision) * interval '1 second'
                    THEN 'off' ELSE state END,
       reason = CASE WHEN failing_since <= clock_timestamp() - CAST(:patience AS double precision) * interval '1 second'
                     THEN CAST(:reason AS text) ELSE reason END
 WHERE name = CAST(:name AS text) AND url = CAST(:url AS text) AND state = 'on'
RETURNING name, url, secrets, state, reason, CAST(extract(epoch FROM failing_since) AS double precision),
          CAST(extract(epoch FROM created_at) AS double precision),
          CAST(extract(epoch FROM clock_timestamp()) AS double precision)


-- name: note_success
-- It has taken a webhook: whatever failed before is over.
UPDATE semel_webhooks
   SET failing_since = NULL, changed_at = clock_timestamp()
 WHERE name = CAST(:name AS text) AND url = CAST(:url AS text) AND failing_since IS NOT NULL
RETURNING name, url, secrets, state, reason, CAST(extract(epoch FROM failing_since) AS double precision),
          CAST(extract(epoch FROM created_at) AS double precision),
          CAST(extract(epoch FROM clock_timestamp()) AS double precision)
