-- What a fresh install looks like: the migrations, in order, lead to exactly this. For reading; nothing runs it.
--
-- A row is one key. Times are milliseconds since 1970 by this database's own clock. A table with a rowid, since WITHOUT
-- ROWID keeps rows inside the key's own tree, where answers of up to 1 MiB would push the keys apart; the body is last
-- but for traceparent, the trace of the attempt that ran the handler, which was added later. So reading the rest never
-- touches it.
--
-- The CHECK constraints state what semel/core/record.py states of a Record, where a statement that forgets a column
-- would break it. They compare, and contain no IN: SQLite builds a small tree for each list, at every write. With lists
-- in the constraints and in the conditions of the indexes, a claim and its answer took twice as long.

CREATE TABLE semel_keys (
    scope TEXT NOT NULL,
    key TEXT NOT NULL,
    state TEXT NOT NULL, -- pending, processing, unknown, complete or failed
    attempt INTEGER NOT NULL CHECK (attempt >= 1),
    token BLOB NOT NULL CHECK (length(token) = 16),
    fingerprint BLOB NOT NULL,
    recovery_point TEXT,
    on_crash TEXT NOT NULL DEFAULT 'rerun', -- or refuse
    after_retention TEXT NOT NULL DEFAULT 'delete', -- or strip; keep, once it was stripped
    created_at INTEGER NOT NULL,
    lease_expires_at INTEGER,
    completed_at INTEGER,
    expires_at INTEGER NOT NULL,
    steps TEXT, -- a JSON array of the steps that were taken, in their order, with what they returned
    status INTEGER CHECK (status BETWEEN 100 AND 999),
    headers TEXT, -- a JSON array of [name, value] pairs in their order, each decoded as Latin-1
    request_line TEXT, -- method and path, for people; NULL where they are not known
    request TEXT, -- while it has not ended: what it takes, beside the body, to run it again without its client
    request_body BLOB,
    tries INTEGER NOT NULL DEFAULT 0, -- how often it was run without its client
    accepted INTEGER NOT NULL DEFAULT 0 CHECK (accepted BETWEEN 0 AND 1), -- a worker is to run it
    milestone TEXT, -- how far its handler says it is, as JSON: a fraction and a note
    body BLOB, traceparent TEXT, -- NULL in a terminal record is a tombstone: the answer was sent, but could not be kept
    PRIMARY KEY (scope, key),
    CONSTRAINT terminal_has_an_answer CHECK ((state = 'complete' OR state = 'failed') = (status IS NOT NULL)),
    CONSTRAINT answer_has_headers CHECK ((status IS NOT NULL) = (headers IS NOT NULL)),
    CONSTRAINT body_is_an_answers CHECK (body IS NULL OR status IS NOT NULL),
    CONSTRAINT terminal_says_when_it_ended CHECK ((status IS NOT NULL) = (completed_at IS NOT NULL)),
    CONSTRAINT processing_has_a_lease CHECK ((state = 'processing') = (lease_expires_at IS NOT NULL)),
    CONSTRAINT request_has_a_body CHECK ((request IS NULL) = (request_body IS NULL)),
    CONSTRAINT terminal_keeps_no_request CHECK (request IS NULL OR status IS NULL),
    CONSTRAINT pending_is_accepted CHECK (state <> 'pending' OR accepted),
    CONSTRAINT accepted_has_a_request CHECK (NOT accepted OR request IS NOT NULL OR status IS NOT NULL)
) STRICT;

-- What may be reaped, oldest first; tombstones are not in it. It has no column that an answer changes,
-- so that storing an answer does not write to it.
CREATE INDEX semel_keys_reap ON semel_keys (expires_at) WHERE after_retention <> 'keep';

-- The index of the sweeper and the completer: small, since few records are in progress at a time. By age, not by lease,
-- because an index on the lease would make every renewal write to it.
CREATE INDEX semel_keys_in_progress ON semel_keys (created_at) WHERE status IS NULL;

-- The only clock that is used. (From SQLite 3.42 on, unixepoch('subsec') would do.)
CREATE VIEW semel_keys_clock AS SELECT CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) AS now;

CREATE TABLE semel_keys_migrations (
    name TEXT NOT NULL PRIMARY KEY,
    applied_at INTEGER NOT NULL
) STRICT;

-- The audit trail: what a process or an operator did to which key. Lines are added at the end and removed from the
-- beginning, so their ids are in the order of their time.
CREATE TABLE semel_audit (
    id INTEGER PRIMARY KEY,
    at INTEGER NOT NULL,
    scope TEXT NOT NULL,
    key TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    event TEXT NOT NULL, -- claimed, taken over, saved, completed, failed, released, swept, reaped ...
    actor TEXT NOT NULL, -- the process, or the operator
    detail TEXT
) STRICT;

CREATE INDEX semel_audit_key ON semel_audit (scope, key);

-- Messages to be sent, in the transaction of the change that they tell of. aggregatetype, aggregateid, type and payload
-- are named as Debezium's outbox event router expects them.
CREATE TABLE semel_outbox (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, -- the order in which they were added
    id TEXT NOT NULL UNIQUE, -- the same on every try; consumers tell duplicates by it
    aggregatetype TEXT NOT NULL, -- the destination
    aggregateid TEXT, -- messages with the same one are sent in their order
    type TEXT NOT NULL, -- what happened: order.paid
    state TEXT NOT NULL DEFAULT 'ready', -- waiting for its next try; behind another of its key; dead; sent: kept
    attempts INTEGER NOT NULL DEFAULT 0, -- how many tries have failed
    token BLOB, -- made by the relay that has it
    lease_until INTEGER, -- a relay that is silent until then has lost it
    due_at INTEGER, -- when a waiting one is tried next
    created_at INTEGER NOT NULL,
    ended_at INTEGER, -- when it was sent, or became a dead letter
    error TEXT, -- what the last try said
    content_type TEXT NOT NULL,
    headers TEXT, -- a JSON array of [name, value] pairs
    traceparent TEXT,
    payload BLOB NOT NULL,
    CONSTRAINT waiting_is_due CHECK (state <> 'waiting' OR due_at IS NOT NULL),
    CONSTRAINT token_has_a_lease CHECK ((token IS NULL) = (lease_until IS NULL))
) STRICT;

CREATE INDEX semel_outbox_ready ON semel_outbox (aggregatetype, seq) WHERE state = 'ready';
CREATE INDEX semel_outbox_order ON semel_outbox (aggregatetype, aggregateid, seq)
 WHERE state = 'ready' AND aggregateid IS NOT NULL;
CREATE INDEX semel_outbox_aside ON semel_outbox (aggregatetype, aggregateid, seq)
 WHERE (state = 'waiting' OR state = 'behind' OR state = 'dead') AND aggregateid IS NOT NULL;
CREATE INDEX semel_outbox_due ON semel_outbox (aggregatetype, due_at) WHERE state = 'waiting';
CREATE INDEX semel_outbox_ended ON semel_outbox (state, ended_at) WHERE state = 'dead' OR state = 'sent';

-- The messages that a consumer has handled, or tried to.
CREATE TABLE semel_inbox (
    consumer TEXT NOT NULL,
    message_id TEXT NOT NULL,
    state TEXT NOT NULL, -- done; failing: the last try failed; parked: it waits for a person
    attempts INTEGER NOT NULL, -- how many tries have failed
    digest BLOB, -- of the payload; a redelivery must match
    received_at INTEGER NOT NULL,
    changed_at INTEGER NOT NULL,
    error TEXT,
    PRIMARY KEY (consumer, message_id)
) STRICT;

CREATE INDEX semel_inbox_age ON semel_inbox (changed_at) WHERE state = 'done';
CREATE INDEX semel_inbox_trouble ON semel_inbox (consumer, state, changed_at) WHERE state <> 'done';

-- Endpoints of webhooks. Each is a destination of its own, by its name.
CREATE TABLE semel_webhooks (
    name TEXT NOT NULL PRIMARY KEY,
    url TEXT NOT NULL,
    secrets TEXT NOT NULL, -- where the signing secrets are, newest first, as a JSON array: env:NAME, file:PATH
    state TEXT NOT NULL DEFAULT 'on', -- or off
    reason TEXT, -- why it is off
    failing_since INTEGER, -- the first failure after the last success
    created_at INTEGER NOT NULL,
    changed_at INTEGER NOT NULL
) STRICT;

-- How many requests have ended how, by minute: each process adds what it has counted, now and then. Kept for two hours.
CREATE TABLE semel_counts (
    minute INTEGER NOT NULL, -- its beginning, by the database's clock when it was added
    outcome TEXT NOT NULL, -- as in the metrics; "added": how often processes have added, with or without requests
    n INTEGER NOT NULL,
    PRIMARY KEY (minute, outcome)
) STRICT, WITHOUT ROWID;
