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

    PRIMARY KEY (scope, key),
    CONSTRAINT semel_keys_state    CHECK (state IN ('pending', 'processing', 'complete', 'failed')),
    CONSTRAINT semel_keys_attempt  CHECK (attempt >= 1),
    CONSTRAINT semel_keys_token    CHECK (octet_length(token) = 16),
    CONSTRAINT semel_keys_lease    CHECK ((state = 'processing') = (lease_expires_at IS NOT NULL)),
    CONSTRAINT semel_keys_ending   CHECK ((state IN ('complete', 'failed')) = (completed_at IS NOT NULL)),
    CONSTRAINT semel_keys_answer   CHECK ((state IN ('complete', 'failed')) = (status IS NOT NULL)
                                          AND (status IS NULL) = (headers IS NULL)
                                          AND (status IS NOT NULL OR body IS NULL))
);

-- What the reaper walks. now() can't stand in an index predicate (it must be immutable), but a state can,
-- and it keeps what is in flight out of reach.
CREATE INDEX semel_keys_reap ON semel_keys (expires_at) WHERE state IN ('complete', 'failed');
