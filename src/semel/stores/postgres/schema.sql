-- One row for each idempotency key that was used within its retention.
-- What is true of a row is said by its constraints, so that no program has to be trusted.
-- The collation is "C": a key is compared byte for byte, and sorted the same way on every server.
CREATE TABLE semel_keys (
    scope            text COLLATE "C" NOT NULL,   -- whose key it is: two principals with one key never meet
    key              text COLLATE "C" NOT NULL,   -- as the client sent it, without the quotes
    state            text COLLATE "C" NOT NULL,
    attempt          integer          NOT NULL,   -- counts the workers that took it up
    token            bytea            NOT NULL,   -- made by that worker for that attempt alone
    fingerprint      bytea            NOT NULL,   -- digests of the first request; a retry must match
    recovery_point   text,                        -- the last phase that was committed
    status           smallint,                    -- the answer: status, header pairs as JSON (latin-1), bytes
    headers          text,
    body             bytea,                       -- NULL in a terminal row: sent once, too large to keep
    created_at       timestamptz      NOT NULL,
    lease_expires_at timestamptz,                 -- a worker that is silent until then has lost the key
    completed_at     timestamptz,
    expires_at       timestamptz      NOT NULL,   -- past it, a retry is a new operation
    steps            text,                        -- what each step returned, as JSON; NULL when none is recorded
    on_crash         text COLLATE "C" NOT NULL DEFAULT 'rerun',    -- what follows when a worker died in the middle
    after_retention  text COLLATE "C" NOT NULL DEFAULT 'delete',   -- what the reaper leaves of it
    request          text,                        -- the request as JSON (latin-1), where it can be run again
    request_body     bytea,
    tries            integer          NOT NULL DEFAULT 0,   -- how often it was run without its client
    accepted         boolean          NOT NULL DEFAULT false,   -- its client was told that a worker would run it
    milestone        text,                        -- how far its handler says it is, as JSON: a fraction and a note
    owner            bigint,                      -- the advisory lock that its worker's process holds while it lives;
                                                  -- NULL: only the lease tells

    PRIMARY KEY (scope, key),
    CONSTRAINT semel_keys_state    CHECK (state IN ('pending', 'processing', 'unknown', 'complete', 'failed')),
    CONSTRAINT semel_keys_attempt  CHECK (attempt >= 1),
    CONSTRAINT semel_keys_token    CHECK (octet_length(token) = 16),
    CONSTRAINT semel_keys_lease    CHECK ((state = 'processing') = (lease_expires_at IS NOT NULL)),
    CONSTRAINT semel_keys_ending   CHECK ((state IN ('complete', 'failed')) = (completed_at IS NOT NULL)),
    CONSTRAINT semel_keys_answer   CHECK ((state IN ('complete', 'failed')) = (status IS NOT NULL)
                                          AND (status IS NULL) = (headers IS NULL)
                                          AND (status IS NOT NULL OR body IS NULL)),
    CONSTRAINT semel_keys_on_crash CHECK (on_crash IN ('rerun', 'refuse')),
    CONSTRAINT semel_keys_after_retention CHECK (after_retention IN ('delete', 'strip', 'keep')),
    CONSTRAINT semel_keys_steps    CHECK (recovery_point IS NULL OR steps IS NOT NULL),
    CONSTRAINT semel_keys_request  CHECK ((request IS NULL) = (request_body IS NULL)
                                          AND (request IS NULL OR state NOT IN ('complete', 'failed'))),
    CONSTRAINT semel_keys_pending  CHECK (state <> 'pending' OR accepted),
    CONSTRAINT semel_keys_accepted CHECK (NOT accepted OR request IS NOT NULL OR state IN ('complete', 'failed')),
    CONSTRAINT semel_keys_milestone CHECK (milestone IS NULL OR state <> 'pending')
);

-- What the reaper walks. now() can't stand in an index predicate (it must be immutable), but a state can,
-- and it keeps what is in flight out of reach. What is stripped already is not walked again.
CREATE INDEX semel_keys_reap ON semel_keys (expires_at)
 WHERE state IN ('complete', 'failed') AND after_retention <> 'keep';

-- What the sweeper and the completer walk: small, since little is in progress at a time. By age and not by lease,
-- because an index on the lease would make every renewal write to it.
CREATE INDEX semel_keys_in_progress ON semel_keys (created_at) WHERE state IN ('pending', 'processing', 'unknown');

-- One line for each change of a record, written in the same transaction. It outlives the record.
CREATE TABLE semel_audit (
    id      bigint           GENERATED ALWAYS AS IDENTITY,
    at      timestamptz      NOT NULL,
    scope   text COLLATE "C" NOT NULL,
    key     text COLLATE "C" NOT NULL,
    attempt integer          NOT NULL,
    event   text COLLATE "C" NOT NULL,   -- claimed, taken over, saved, completed, failed, released, swept, reaped ...
    actor   text             NOT NULL,   -- the process, or the operator
    detail  text,

    PRIMARY KEY (scope, key, id)
);

-- Lines are written in the order of their time, so this costs next to nothing, and finds the old ones.
CREATE INDEX semel_audit_at ON semel_audit USING brin (at) WITH (autosummarize = on);
