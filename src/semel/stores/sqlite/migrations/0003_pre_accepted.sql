-- Operations that are accepted, and run by a worker; how far a handler says it is. schema.sql explains every part.
--
-- The new columns come before the body, which is last so that reading the rest never touches it. So the table is made
-- again, as it was before, and what is in it waits in a copy meanwhile.

CREATE TABLE semel_keys_before AS SELECT * FROM semel_keys ORDER BY rowid;

DROP TABLE semel_keys;

CREATE TABLE semel_keys (
    scope TEXT NOT NULL CHECK (length(scope) BETWEEN 1 AND 1024),
    key TEXT NOT NULL CHECK (length(key) BETWEEN 1 AND 1024),
    state TEXT NOT NULL CHECK (state IN ('pending', 'processing', 'unknown', 'complete', 'failed')),
    attempt INTEGER NOT NULL CHECK (attempt >= 1),
    token BLOB NOT NULL CHECK (length(token) = 16),
    fingerprint BLOB NOT NULL CHECK (length(fingerprint) <= 128),
    recovery_point TEXT CHECK (length(recovery_point) BETWEEN 1 AND 255),
    on_crash TEXT NOT NULL DEFAULT 'rerun' CHECK (on_crash IN ('rerun', 'refuse')),
    after_retention TEXT NOT NULL DEFAULT 'delete' CHECK (after_retention IN ('delete', 'strip', 'keep')),
    created_at INTEGER NOT NULL,
    lease_expires_at INTEGER,
    completed_at INTEGER,
    expires_at INTEGER NOT NULL,
    steps TEXT, -- a JSON array of the steps that were taken, in their order, with what they returned
    status INTEGER CHECK (status BETWEEN 100 AND 999),
    headers TEXT, -- a JSON array of [name, value] pairs in their order, each decoded as Latin-1
    request TEXT, -- while it has not ended: what it takes, beside the body, to run it again without its client
    request_body BLOB,
    tries INTEGER NOT NULL DEFAULT 0, -- how often it was run without its client
    accepted INTEGER NOT NULL DEFAULT 0 CHECK (accepted IN (0, 1)), -- its client was told that a worker would run it
    milestone TEXT, -- how far its handler says it is, as JSON: a fraction and a note
    body BLOB, -- NULL in a terminal record is a tombstone: the answer was sent, but could not be kept
    PRIMARY KEY (scope, key),
    CONSTRAINT terminal_has_an_answer CHECK ((state IN ('complete', 'failed')) = (status IS NOT NULL)),
    CONSTRAINT answer_has_headers CHECK ((status IS NOT NULL) = (headers IS NOT NULL)),
    CONSTRAINT body_is_an_answers CHECK (body IS NULL OR status IS NOT NULL),
    CONSTRAINT terminal_says_when_it_ended CHECK ((state IN ('complete', 'failed')) = (completed_at IS NOT NULL)),
    CONSTRAINT processing_has_a_lease CHECK ((state = 'processing') = (lease_expires_at IS NOT NULL)),
    CONSTRAINT recovery_point_is_a_step CHECK (recovery_point IS NULL OR steps IS NOT NULL),
    CONSTRAINT request_has_a_body CHECK ((request IS NULL) = (request_body IS NULL)),
    CONSTRAINT terminal_keeps_no_request CHECK (request IS NULL OR state NOT IN ('complete', 'failed')),
    CONSTRAINT pending_is_accepted CHECK (state <> 'pending' OR accepted),
    CONSTRAINT accepted_has_a_request
        CHECK (NOT accepted OR request IS NOT NULL OR state IN ('complete', 'failed')),
    CONSTRAINT pending_has_no_milestone CHECK (milestone IS NULL OR state <> 'pending')
) STRICT;

-- What may be reaped, oldest first. Nothing in flight is ever in it, and what is stripped already is walked no more.
CREATE INDEX semel_keys_reap ON semel_keys (expires_at)
    WHERE state IN ('complete', 'failed') AND after_retention <> 'keep';

-- What the sweeper and the completer walk: small, since little is in progress at a time. By age and not by lease,
-- because an index on the lease would make every renewal write to it.
CREATE INDEX semel_keys_in_progress ON semel_keys (created_at) WHERE state IN ('pending', 'processing', 'unknown');

INSERT INTO semel_keys (
    scope, key, state, attempt, token, fingerprint, recovery_point, on_crash, after_retention,
    created_at, lease_expires_at, completed_at, expires_at, steps, status, headers, request, request_body, tries, body
)
SELECT
    scope, key, state, attempt, token, fingerprint, recovery_point, on_crash, after_retention,
    created_at, lease_expires_at, completed_at, expires_at, steps, status, headers, request, request_body, tries, body
FROM semel_keys_before ORDER BY rowid;

DROP TABLE semel_keys_before;
