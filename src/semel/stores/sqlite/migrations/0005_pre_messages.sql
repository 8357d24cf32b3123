-- The outbox, the inbox and the endpoints of webhooks. schema.sql explains every part.

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
