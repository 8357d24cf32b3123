-- The outbox, the inbox and the endpoints of webhooks. schema.sql explains every part.

-- Messages to be sent, in the transaction of the change that they tell of. aggregatetype, aggregateid, type and payload
-- are named as Debezium's outbox event router expects them.
CREATE TABLE semel_outbox (
    id            uuid             PRIMARY KEY,  -- the same on every try; consumers tell duplicates by it
    seq           bigint           GENERATED ALWAYS AS IDENTITY,   -- the order in which they were added
    aggregatetype text COLLATE "C" NOT NULL,     -- the destination
    aggregateid   text COLLATE "C",              -- messages with the same one are sent in their order
    type          text COLLATE "C" NOT NULL,     -- what happened: order.paid
    state         text COLLATE "C" NOT NULL DEFAULT 'ready',   -- ready; waiting for its next try; behind another of its
                                                 -- key; dead: it waits for a person; sent: kept on request
    attempts      integer          NOT NULL DEFAULT 0,   -- how many tries have failed
    token         bytea,                         -- made by the relay that has it
    lease_until   timestamptz,                   -- a relay that is silent until then has lost it
    due_at        timestamptz,                   -- when a waiting one is tried next
    created_at    timestamptz      NOT NULL DEFAULT clock_timestamp(),
    ended_at      timestamptz,                   -- when it was sent, or became a dead letter
    error         text,                          -- what the last try said
    content_type  text             NOT NULL,
    headers       text,                          -- a JSON array of [name, value] pairs
    traceparent   text,
    payload       bytea            NOT NULL,

    CONSTRAINT semel_outbox_state CHECK (state IN ('ready', 'waiting', 'behind', 'dead', 'sent')
        AND (state <> 'waiting' OR due_at IS NOT NULL) AND (token IS NULL) = (lease_until IS NULL))
) WITH (fillfactor = 45);   -- A claim changes no indexed column, and finds room on the same page.

-- What a relay walks, from where it was last. Nothing that has left "ready" comes back to it.
CREATE INDEX semel_outbox_ready ON semel_outbox (aggregatetype, seq) WHERE state = 'ready';
-- Whether a message is the first of its key among those.
CREATE INDEX semel_outbox_order ON semel_outbox (aggregatetype, aggregateid, seq)
 WHERE state = 'ready' AND aggregateid IS NOT NULL;
-- The few that had trouble: by key, and by when they are due.
CREATE INDEX semel_outbox_aside ON semel_outbox (aggregatetype, aggregateid, seq)
 WHERE state IN ('waiting', 'behind', 'dead') AND aggregateid IS NOT NULL;
CREATE INDEX semel_outbox_due ON semel_outbox (aggregatetype, due_at) WHERE state = 'waiting';
CREATE INDEX semel_outbox_ended ON semel_outbox (state, ended_at) WHERE state IN ('dead', 'sent');

-- The messages that a consumer has handled, or tried to.
CREATE TABLE semel_inbox (
    consumer    text COLLATE "C" NOT NULL,
    message_id  text COLLATE "C" NOT NULL,
    state       text COLLATE "C" NOT NULL,     -- done; failing: the last try failed; parked: it waits for a person
    attempts    integer          NOT NULL,     -- how many tries have failed
    digest      bytea,                         -- of the payload; a redelivery must match
    received_at timestamptz      NOT NULL DEFAULT clock_timestamp(),
    changed_at  timestamptz      NOT NULL DEFAULT clock_timestamp(),
    error       text,

    PRIMARY KEY (consumer, message_id),
    CONSTRAINT semel_inbox_state CHECK (state IN ('done', 'failing', 'parked'))
);

CREATE INDEX semel_inbox_age ON semel_inbox (changed_at) WHERE state = 'done';
CREATE INDEX semel_inbox_trouble ON semel_inbox (consumer, state, changed_at) WHERE state <> 'done';

-- Endpoints of webhooks. Each is a destination of its own, by its name.
CREATE TABLE semel_webhooks (
    name          text COLLATE "C" PRIMARY KEY,
    url           text             NOT NULL,
    secrets       text             NOT NULL,   -- where the signing secrets are, newest first, as a JSON array: env:NAME,
                                               -- file:PATH; never the secrets themselves
    state         text COLLATE "C" NOT NULL DEFAULT 'on',   -- on, off
    reason        text,                        -- why it is off
    failing_since timestamptz,                 -- the first failure after the last success
    created_at    timestamptz      NOT NULL DEFAULT clock_timestamp(),
    changed_at    timestamptz      NOT NULL DEFAULT clock_timestamp(),

    CONSTRAINT semel_webhooks_state CHECK (state IN ('on', 'off'))
);
