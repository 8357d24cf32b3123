-- Steps and what they returned; requests that can be run again without their client; the parked state; the audit trail.
ALTER TABLE semel_keys
    ADD COLUMN steps           text,
    ADD COLUMN on_crash        text COLLATE "C" NOT NULL DEFAULT 'rerun',
    ADD COLUMN after_retention text COLLATE "C" NOT NULL DEFAULT 'delete',
    ADD COLUMN request         text,
    ADD COLUMN request_body    bytea,
    ADD COLUMN tries           integer NOT NULL DEFAULT 0,
    DROP CONSTRAINT semel_keys_state,
    ADD CONSTRAINT semel_keys_state CHECK (state IN ('pending', 'processing', 'unknown', 'complete', 'failed')),
    ADD CONSTRAINT semel_keys_on_crash CHECK (on_crash IN ('rerun', 'refuse')),
    ADD CONSTRAINT semel_keys_after_retention CHECK (after_retention IN ('delete', 'strip', 'keep')),
    ADD CONSTRAINT semel_keys_steps CHECK (recovery_point IS NULL OR steps IS NOT NULL),
    ADD CONSTRAINT semel_keys_request CHECK ((request IS NULL) = (request_body IS NULL)
                                             AND (request IS NULL OR state NOT IN ('complete', 'failed')));

-- What is stripped already is not walked again.
DROP INDEX semel_keys_reap;
CREATE INDEX semel_keys_reap ON semel_keys (expires_at)
 WHERE state IN ('complete', 'failed') AND after_retention <> 'keep';

-- What the sweeper and the completer walk: small, since little is in progress at a time. By age and not by lease,
-- because an index on the lease would make every renewal write to it.
CREATE INDEX semel_keys_in_progress ON semel_keys (created_at) WHERE state IN ('pending', 'processing', 'unknown');

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
