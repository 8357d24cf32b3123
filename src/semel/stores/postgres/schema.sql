-- One row for each idempotency key that was used within its retention.
-- The collation is "C": a key is compared byte for byte, and sorted the same way on every server.
CREATE TABLE semel_keys (
    scope            text COLLATE "C" NOT NULL,   -- the owner of the key: two principals with one key never meet
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
    request_line     text,                        -- for people: "POST /payments"; NULL where that is not known
    upkeep           text COLLATE "C",            -- open: the services look after it until it ends; parked: it waits for
                                                  -- a person; NULL: it has ended, or is young and most likely will soon

    PRIMARY KEY (scope, key),
    -- Each costs its microseconds with every statement that writes, so there are two. A token of another length would be
    -- that of no worker, and the fence open; tokens that won come back one after the other, 16 bytes each.
    CONSTRAINT semel_keys_token CHECK (octet_length(token) = 16),
    -- A record in progress without a lease would be taken over at once, and run twice; one that ended without an answer,
    -- or began anew with the old one, would replay what never was. Those that end, complete and failed, come before the
    -- others in the alphabet: to name them would take the server as long again, since it reads this with each statement.
    CONSTRAINT semel_keys_shape CHECK (
        (state < 'p') = (status IS NOT NULL) AND (state <> 'processing' OR lease_expires_at IS NOT NULL))
) WITH (fillfactor = 40);   -- Each row is written twice. The answer finds room on the same page, and no index is written.

-- Indexes name no column that an ordinary completion changes (state, lease, answer), nor does a predicate: then it is a
-- heap-only update.
-- What the reaper walks: neither tombstones, which are stripped already, nor what is parked.
CREATE INDEX semel_keys_expiry ON semel_keys (expires_at)
 WHERE after_retention <> 'keep' AND upkeep IS DISTINCT FROM 'parked';

-- What the services walk, past each record once, and people, from the newest on. It grows at one end.
CREATE INDEX semel_keys_age ON semel_keys (created_at);

-- The few that the services look after: accepted, long in progress, left by a worker, parked.
CREATE INDEX semel_keys_upkeep ON semel_keys (upkeep, created_at) WHERE upkeep IS NOT NULL;

-- How far the services have walked: what is older and has not ended is in semel_keys_upkeep. It may be moved back at any
-- time, and be missing.
CREATE TABLE semel_keys_watermark (
    one      boolean     PRIMARY KEY DEFAULT true CHECK (one),   -- there is one row
    swept_to timestamptz NOT NULL
);

-- One line for each extraordinary change of a record, or, on request, for each; written in the same transaction. It
-- outlives the record.
CREATE TABLE semel_audit (
    id      bigint           GENERATED ALWAYS AS IDENTITY,
    at      timestamptz      NOT NULL,
    scope   text COLLATE "C" NOT NULL,
    key     text COLLATE "C" NOT NULL,
    attempt integer          NOT NULL,
    event   text COLLATE "C" NOT NULL,   -- taken over, saved, released, swept, reaped ...
    actor   text             NOT NULL,   -- the process, or the operator
    detail  text,

    PRIMARY KEY (scope, key, id)
);

-- Lines are written in the order of their time, so this costs next to nothing, and finds the old ones.
CREATE INDEX semel_audit_at ON semel_audit USING brin (at) WITH (autosummarize = on);
