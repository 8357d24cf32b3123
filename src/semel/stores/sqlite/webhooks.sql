-- What is said to SQLite about the endpoints of webhooks, each in a transaction of its own.
-- Only this database's own clock tells the time, in milliseconds. A row of an endpoint is always the same columns.

-- name: add
-- A new endpoint. No row comes back if there is one of this name.
INSERT INTO semel_webhooks (name, url, secrets, created_at, changed_at)
SELECT :name, :url, :secrets, now, now FROM semel_keys_clock WHERE true
ON CONFLICT (name) DO NOTHING
RETURNING
    name, url, secrets, state, reason, failing_since / 1000.0, created_at / 1000.0,
    (SELECT now / 1000.0 FROM semel_keys_clock)

-- name: replace
-- An endpoint of this name has another URL, or other secrets. Its failures were those of what was there before.
INSERT INTO semel_webhooks (name, url, secrets, created_at, changed_at)
SELECT :name, :url, :secrets, now, now FROM semel_keys_clock WHERE true
ON CONFLICT (name) DO UPDATE SET
    url = excluded.url, secrets = excluded.secrets, failing_since = NULL, changed_at = excluded.changed_at
RETURNING
    name, url, secrets, state, reason, failing_since / 1000.0, created_at / 1000.0,
    (SELECT now / 1000.0 FROM semel_keys_clock)

-- name: list
-- All of them, by name.
SELECT
    name, url, secrets, state, reason, failing_since / 1000.0, created_at / 1000.0,
    (SELECT now / 1000.0 FROM semel_keys_clock)
FROM semel_webhooks
ORDER BY name

-- name: enable
-- Send to it again. It has as long to fail as a new one. With :was, only if its state and reason are still those.
UPDATE semel_webhooks
SET state = 'on', reason = NULL, failing_since = NULL, changed_at = (SELECT now FROM semel_keys_clock)
WHERE
    name = :name AND url = coalesce(:url, url)
    AND (:was IS NULL OR (state = :was AND coalesce(reason, '') = :why))
RETURNING
    name, url, secrets, state, reason, failing_since / 1000.0, created_at / 1000.0,
    (SELECT now / 1000.0 FROM semel_keys_clock)

-- name: disable
-- Send nothing more to it. A relay names the URL that it has sent to: the operator may have given another meanwhile.
UPDATE semel_webhooks
SET state = 'off', reason = :reason, changed_at = (SELECT now FROM semel_keys_clock)
WHERE
    name = :name AND url = coalesce(:url, url)
    AND (:was IS NULL OR (state = :was AND coalesce(reason, '') = :why))
RETURNING
    name, url, secrets, state, reason, failing_since / 1000.0, created_at / 1000.0,
    (SELECT now / 1000.0 FROM semel_keys_clock)

-- name: remove
-- Forget it. Its messages stay in the outbox.
DELETE FROM semel_webhooks
WHERE name = :name
RETURNING
    name, url, secrets, state, reason, failing_since / 1000.0, created_at / 1000.0,
    (SELECT now / 1000.0 FROM semel_keys_clock)

-- name: note_failure
-- It has failed. The first failure after a success is remembered, and the one that comes too long after it turns the
-- endpoint off.
UPDATE semel_webhooks
SET
    failing_since = coalesce(failing_since, (SELECT now FROM semel_keys_clock)),
    changed_at = (SELECT now FROM semel_keys_clock),
    state = CASE
        WHEN failing_since <= (SELECT now FROM semel_keys_clock) - :patience * 1000 THEN 'off'
        ELSE state
    END,
    reason = CASE
        WHEN failing_since <= (SELECT now FROM semel_keys_clock) - :patience * 1000 THEN :reason
        ELSE reason
    END
WHERE name = :name AND url = :url AND state = 'on'
RETURNING
    name, url, secrets, state, reason, failing_since / 1000.0, created_at / 1000.0,
    (SELECT now / 1000.0 FROM semel_keys_clock)

-- name: note_success
-- It has taken a webhook: whatever failed before is over.
UPDATE semel_webhooks
SET failing_since = NULL, changed_at = (SELECT now FROM semel_keys_clock)
WHERE name = :name AND url = :url AND failing_since IS NOT NULL
RETURNING
    name, url, secrets, state, reason, failing_since / 1000.0, created_at / 1000.0,
    (SELECT now / 1000.0 FROM semel_keys_clock)
