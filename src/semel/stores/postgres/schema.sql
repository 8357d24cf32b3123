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
    body             bytea,                       -- NULL in a terminal row: sent once, too large to keep; or
                                                  -- in semel_answers: see answer_day
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
    traceparent      text,                        -- the trace of the attempt that ran its handler (W3C), if there was one
    answer_day       date,                        -- the body is in semel_answers, in the partition of this day; NULL: here

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

-- How many requests have ended how, by minute: each process adds what it has counted, now and then. Kept for two hours.
CREATE TABLE semel_counts (
    minute  timestamptz      NOT NULL,   -- its beginning, by the server's clock when it was added
    outcome text COLLATE "C" NOT NULL,   -- as in the metrics; "added": how often processes have added, with or without
    n       bigint           NOT NULL,   -- requests of their own

    PRIMARY KEY (minute, outcome)
);

-- What the partitioned layout needs (partitioned.sql makes the rest of it). Without semel_answers they do nothing.

-- The body of an answer that is in semel_answers. It is found by its token, so a day that is out of date gives no other
-- attempt's. It is called, and its partitions are looked for, only where there is a day: STRICT. It is VOLATILE, for
-- "settle" reads a record that is younger than its own snapshot.
CREATE OR REPLACE FUNCTION semel_answer(asked_day date, asked_token bytea) RETURNS bytea
    LANGUAGE plpgsql STRICT AS $$
BEGIN
    IF to_regclass('semel_answers') IS NULL THEN
        RETURN NULL;
    END IF;
    RETURN (SELECT body FROM semel_answers WHERE day = asked_day AND token = asked_token);
END $$;

-- Delete the body of an answer that is in semel_answers: the record's owner is erased.
CREATE OR REPLACE FUNCTION semel_forget_answer(asked_day date, asked_token bytea) RETURNS boolean
    LANGUAGE plpgsql STRICT AS $$
BEGIN
    IF to_regclass('semel_answers') IS NOT NULL THEN
        DELETE FROM semel_answers WHERE day = asked_day AND token = asked_token;
    END IF;
    RETURN true;
END $$;

-- What the trigger of the partitioned layout does with a body of more bytes than its argument says: it goes into
-- semel_answers. It stays in the row where the role may not write there, and where another answer has that token, as
-- those have that an operator gave.
CREATE OR REPLACE FUNCTION semel_move_answer() RETURNS trigger
    LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'INSERT' AND NEW.body IS NULL THEN
        RETURN NEW;     -- A row that was copied, as from a dump: its answer is where the day says.
    END IF;
    NEW.answer_day := NULL;
    IF octet_length(NEW.body) > TG_ARGV[0]::integer AND NEW.token <> decode(repeat('00', 16), 'hex')
       AND has_table_privilege(to_regclass('semel_answers'), 'INSERT') THEN
        INSERT INTO semel_answers (day, token, body)
        VALUES ((NEW.expires_at AT TIME ZONE 'UTC')::date, NEW.token, NEW.body)
            ON CONFLICT DO NOTHING;
        IF FOUND THEN
            NEW.answer_day := (NEW.expires_at AT TIME ZONE 'UTC')::date;
            NEW.body := NULL;
        END IF;
    END IF;
    RETURN NEW;
END $$;

-- One step of what the reaper does with the partitions of semel_answers: make one ahead; or drop one; or delete a batch
-- of old answers from the default partition. It is called until there is nothing to do. What it does not get a lock for
-- within a moment, it leaves to the next run.
CREATE OR REPLACE FUNCTION semel_rotate_answers(
        reaped_to timestamptz, batch integer, makes boolean DEFAULT NULL,
        OUT made integer, OUT dropped integer, OUT deleted integer, OUT trouble text)
    LANGUAGE plpgsql SET lock_timeout = '200ms' AS $$
DECLARE
    parent   regclass := to_regclass('semel_answers');
    today    date := (clock_timestamp() AT TIME ZONE 'UTC')::date;
    over     date;
    missing  date;
    old      date;
    days     date[];
    place    text;
    owner    text;
    rest     regclass;
    is_there boolean;
    is_late  boolean := false;
BEGIN
    made := 0;
    dropped := 0;
    deleted := 0;
    IF parent IS NULL OR NOT pg_try_advisory_xact_lock(parent::oid::bigint) THEN
        RETURN;
    END IF;
    SELECT relnamespace::regnamespace::text, relowner::regrole::text INTO place, owner FROM pg_class WHERE oid = parent;
    rest := to_regclass(format('%s.%I', place, 'semel_answers_rest'));
    SELECT coalesce(array_agg(to_date(right(relname, 6), 'YYMMDD')), '{}') INTO days
      FROM pg_inherits JOIN pg_class ON oid = inhrelid
     WHERE inhparent = parent AND relname ~ '_[0-9]{6}$';

    -- Days up to the last one on which a record expires, and three more. A day that has answers in the default partition
    -- stays there. To attach a partition is to read through the default one, while what uses that waits.
    IF coalesce(makes, EXISTS (SELECT FROM pg_trigger WHERE tgrelid = 'semel_keys'::regclass
                                  AND tgname = 'semel_keys_answer' AND tgenabled IN ('O', 'A'))) THEN
        FOR missing IN SELECT day::date
                         FROM generate_series(today::timestamp, least(today + 400, 3 + greatest(today, (
                                SELECT (expires_at AT TIME ZONE 'UTC')::date FROM semel_keys
                                 WHERE after_retention <> 'keep' AND upkeep IS DISTINCT FROM 'parked'
                                 ORDER BY expires_at DESC LIMIT 1))), interval '1 day') AS day
                        WHERE day::date <> ALL (days)
        LOOP
            IF has_table_privilege(rest, 'SELECT') THEN
                EXECUTE format('SELECT EXISTS (SELECT FROM %s WHERE day = $1)', rest) INTO is_there USING missing;
                CONTINUE WHEN is_there;
            END IF;
            is_late := true;
            EXIT WHEN NOT pg_has_role(owner::regrole, 'USAGE');
            IF pg_relation_size(rest) > 268435456 THEN
                trouble := 'semel_answers_rest is too large to be read through, so no partition is made';
                EXIT;
            END IF;
            BEGIN
                EXECUTE format('CREATE TABLE %s.%I (LIKE %s INCLUDING ALL) WITH (autovacuum_vacuum_insert_threshold = -1)',
                               place, 'semel_answers_' || to_char(missing, 'YYMMDD'), parent);
                -- Otherwise only this role, and not the owner of the others, could drop it.
                EXECUTE format('ALTER TABLE %s.%I OWNER TO %s',
                               place, 'semel_answers_' || to_char(missing, 'YYMMDD'), owner);
                EXECUTE format('ALTER TABLE %s ATTACH PARTITION %s.%I FOR VALUES IN (%L)',
                               parent, place, 'semel_answers_' || to_char(missing, 'YYMMDD'), missing);
                made := 1;
            EXCEPTION
                WHEN lock_not_available OR deadlock_detected OR check_violation THEN NULL;
                WHEN insufficient_privilege THEN trouble := SQLERRM;
                WHEN duplicate_table THEN
                    trouble := SQLERRM;
                    CONTINUE;
            END;
            EXIT;
        END LOOP;
    END IF;

    -- Days that are over for an hour, and of which no record is left but tombstones.
    over := (least(clock_timestamp() - interval '1 hour',
                   (SELECT expires_at FROM semel_keys
                     WHERE after_retention <> 'keep' AND upkeep IS DISTINCT FROM 'parked' AND expires_at >= reaped_to
                     ORDER BY expires_at LIMIT 1)) AT TIME ZONE 'UTC')::date;
    old := (SELECT min(day) FROM unnest(days) AS day WHERE day < over);
    IF made = 0 AND old IS NOT NULL AND pg_has_role(owner::regrole, 'USAGE') THEN
        BEGIN
            EXECUTE format('LOCK TABLE ONLY %s IN ACCESS EXCLUSIVE MODE', parent);
            -- Again: an answer may have come until now.
            IF NOT EXISTS (SELECT FROM semel_keys
                            WHERE after_retention <> 'keep' AND upkeep IS DISTINCT FROM 'parked'
                              AND expires_at >= reaped_to
                              AND expires_at < (old + 1)::timestamp AT TIME ZONE 'UTC') THEN
                EXECUTE format('DROP TABLE %s.%I', place, 'semel_answers_' || to_char(old, 'YYMMDD'));
                dropped := 1;
            END IF;
        EXCEPTION
            WHEN lock_not_available OR deadlock_detected THEN NULL;
            WHEN insufficient_privilege THEN trouble := SQLERRM;
        END;
    END IF;

    -- To lock a row takes UPDATE.
    IF made + dropped = 0 AND has_table_privilege(rest, 'SELECT') AND has_table_privilege(rest, 'UPDATE')
       AND has_table_privilege(rest, 'DELETE') THEN
        EXECUTE format('DELETE FROM %1$s
         WHERE ctid = ANY (ARRAY(SELECT ctid FROM %1$s
                                  WHERE day < $1 ORDER BY day LIMIT $2 FOR UPDATE SKIP LOCKED))', rest) USING over, batch;
        GET DIAGNOSTICS deleted = ROW_COUNT;
    END IF;

    IF trouble IS NULL AND (is_late OR old IS NOT NULL) AND NOT pg_has_role(owner::regrole, 'USAGE') THEN
        trouble := format('the role %I may not make or drop partitions of %s: run semel reap as %s, or GRANT %s TO %I',
                          current_user, parent, owner, owner, current_user);
    END IF;
END $$;
