-- The table of keys. schema.sql explains every part of it.

CREATE TABLE semel_keys (
    scope TEXT NOT NULL CHECK (length(scope) BETWEEN 1 AND 1024),
    key TEXT NOT NULL CHECK (length(key) BETWEEN 1 AND 1024),
    state TEXT NOT NULL CHECK (state IN ('pending', 'processing', 'complete', 'failed')),
    attempt INTEGER NOT NULL CHECK (attempt >= 1),
    token BLOB NOT NULL CHECK (length(token) = 16),
    fingerprint BLOB NOT NULL CHECK (length(fingerprint) <= 128),
    recovery_point TEXT CHECK (length(recovery_point) BETWEEN 1 AND 255),
    created_at INTEGER NOT NULL,
    lease_expires_at INTEGER,
    completed_at INTEGER,
    expires_at INTEGER NOT NULL,
    status INTEGER CHECK (status BETWEEN 100 AND 999),
    headers TEXT, -- a JSON array of [name, value] pairs in their order, each decoded as Latin-1
    body BLOB, -- NULL in a terminal record is a tombstone: the answer was sent, but could not be kept
    PRIMARY KEY (scope, key),
    CONSTRAINT terminal_has_an_answer CHECK ((state IN ('complete', 'failed')) = (status IS NOT NULL)),
    CONSTRAINT answer_has_headers CHECK ((status IS NOT NULL) = (headers IS NOT NULL)),
    CONSTRAINT body_is_an_answers CHECK (body IS NULL OR status IS NOT NULL),
    CONSTRAINT terminal_says_when_it_ended CHECK ((state IN ('complete', 'failed')) = (completed_at IS NOT NULL)),
    CONSTRAINT processing_has_a_lease CHECK ((state = 'processing') = (lease_expires_at IS NOT NULL))
) STRICT;

-- What may be reaped, oldest first. Nothing in flight is ever in it.
CREATE INDEX semel_keys_reap ON semel_keys (expires_at) WHERE state IN ('complete', 'failed');

-- The only clock that decides. (unixepoch('subsec') says it shorter, from SQLite 3.42 on.)
CREATE VIEW semel_keys_clock AS SELECT CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) AS now;

CREATE TABLE semel_keys_migrations (
    name TEXT NOT NULL PRIMARY KEY,
    applied_at INTEGER NOT NULL
) STRICT;
