-- The journal of a client: one row for each intent. It is a file of the application's own, not a store.
-- Times are seconds since 1970, by the clock of the machine that the file is on.

-- name: create
CREATE TABLE IF NOT EXISTS semel_journal (
    -- The application's name for the operation.
    intent      TEXT PRIMARY KEY,
    key         TEXT NOT NULL,
    -- The header that the key is sent in, in lower case.
    header      TEXT NOT NULL,
    state       TEXT NOT NULL CHECK (state = 'pending' OR state = 'done' OR state = 'unknown'),
    method      TEXT NOT NULL,
    url         TEXT NOT NULL,
    -- Without credentials; NULL once it is done.
    headers     TEXT,
    body        BLOB,
    fingerprint BLOB NOT NULL,
    attempts    INTEGER NOT NULL,
    first_at    REAL NOT NULL,
    -- No try may begin after this: the server may have forgotten the key.
    not_after   REAL NOT NULL,
    -- When the server forgets it.
    forgotten_at REAL NOT NULL,
    -- The process that sends it, and until when others leave it alone.
    -- A lease that begins later than after its own length is over: the clock was set back.
    token       BLOB,
    leased_at   REAL NOT NULL,
    leased_to   REAL NOT NULL,
    -- Whether a try may have taken effect. A process that takes it says so before it sends, and takes that back only if
    -- it knows better.
    in_doubt    INTEGER NOT NULL,
    status      INTEGER,
    answer_headers TEXT,
    -- NULL with a status: the answer was too large to be kept.
    answer      BLOB,
    ended_at    REAL,
    CHECK ((state = 'done') = (status IS NOT NULL)),
    CHECK ((state = 'pending') <= (headers IS NOT NULL AND body IS NOT NULL))
) STRICT

-- name: find
SELECT key, state, url, method, headers, body, fingerprint, not_after, leased_to, status, answer_headers, answer,
       header, first_at, forgotten_at, leased_at, in_doubt
FROM semel_journal
WHERE intent = :intent

-- name: insert
-- It is committed, and on the disk, before the first byte of the request leaves.
INSERT INTO semel_journal (
    intent, key, header, state, method, url, headers, body, fingerprint, attempts, first_at, not_after, forgotten_at,
    token, leased_at, leased_to, in_doubt
)
VALUES (
    :intent, :key, :header, 'pending', :method, :url, :headers, :body, :fingerprint, 1, :now, :not_after, :forgotten_at,
    :token, :now, :leased_to, 1
)

-- name: take
-- Its process has died, or gave it back.
UPDATE semel_journal
SET token = :token, leased_at = :now, leased_to = :leased_to, attempts = attempts + 1, in_doubt = 1
WHERE intent = :intent AND state = 'pending'

-- name: renew
-- For one more try, or while one is under way: not when the server may have forgotten the key.
UPDATE semel_journal
SET leased_at = :now, leased_to = :leased_to, attempts = attempts + :tries
WHERE intent = :intent AND state = 'pending' AND token = :token AND forgotten_at > :now

-- name: held
-- No other process has taken it over since this one began.
SELECT 1
FROM semel_journal
WHERE intent = :intent AND state = 'pending' AND token = :token

-- name: release
UPDATE semel_journal
SET token = NULL, leased_to = 0, in_doubt = :in_doubt
WHERE intent = :intent AND state = 'pending' AND token = :token

-- name: settle
-- Without a token, whatever became of the lease: the answer is the key's, and another process would get the same.
-- With one, only if the lease was not lost: what another process sent may have taken effect, and the answer may be a
-- gateway's that knows nothing of it.
UPDATE semel_journal
SET state = 'done', status = :status, answer_headers = :headers, answer = :body, ended_at = :now,
    headers = NULL, body = NULL, token = NULL, leased_to = 0
WHERE intent = :intent AND state = 'pending' AND key = :key AND (:token IS NULL OR token = :token)

-- name: lapse
-- Too late to be sent again. One that a process has at this moment began in time, and ends in time.
UPDATE semel_journal
SET state = 'unknown', token = NULL, headers = NULL, body = NULL, ended_at = :now
WHERE state = 'pending' AND not_after <= :now AND NOT (leased_to > :now AND 2 * leased_at - leased_to <= :now)

-- name: expire
-- Answers are kept for a time. After it, the same intent would be a new operation.
DELETE FROM semel_journal
WHERE state = 'done' AND ended_at <= :before

-- name: count
SELECT count(*) FROM semel_journal

-- name: list
SELECT intent, key, state, method, url, attempts, first_at, not_after, leased_to > :now AND 2 * leased_at - leased_to <= :now, status, ended_at, header
FROM semel_journal
WHERE (:state IS NULL OR state = :state) AND first_at > :after
ORDER BY first_at, intent

-- name: forget
DELETE FROM semel_journal
WHERE intent = :intent AND NOT (leased_to > :now AND 2 * leased_at - leased_to <= :now)
