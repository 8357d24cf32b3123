-- A table that costs half as much to write. No index names a column that completion changes; what the services look
-- after is found by its age, and by a mark of its own; the CHECKs that are left are those that keep answers apart.
-- schema.sql explains every part.
--
-- Nothing is rewritten, but two indexes are built while nothing can be claimed: about a second for a million records.
-- Where that is too long, make the columns and the indexes beforehand, in this order, while requests go on; this then
-- finds them, and takes an instant:
--   ALTER TABLE semel_keys ADD COLUMN IF NOT EXISTS upkeep text COLLATE "C";   (and request_line, in front of it)
--   CREATE INDEX CONCURRENTLY semel_keys_age ... and semel_keys_expiry ..., as below.
ALTER TABLE semel_keys
    ADD COLUMN IF NOT EXISTS request_line text,
    ADD COLUMN IF NOT EXISTS upkeep text COLLATE "C",
    DROP CONSTRAINT semel_keys_state,
    DROP CONSTRAINT semel_keys_attempt,
    DROP CONSTRAINT semel_keys_lease,
    DROP CONSTRAINT semel_keys_ending,
    DROP CONSTRAINT semel_keys_answer,
    DROP CONSTRAINT semel_keys_on_crash,
    DROP CONSTRAINT semel_keys_after_retention,
    DROP CONSTRAINT semel_keys_steps,
    DROP CONSTRAINT semel_keys_request,
    DROP CONSTRAINT semel_keys_pending,
    DROP CONSTRAINT semel_keys_accepted,
    DROP CONSTRAINT semel_keys_milestone,
    ADD CONSTRAINT semel_keys_shape CHECK (
        (state < 'p') = (status IS NOT NULL) AND (state <> 'processing' OR lease_expires_at IS NOT NULL)),
    SET (fillfactor = 40);

-- What is in progress now is followed; found by the index that goes.
UPDATE semel_keys
   SET upkeep = CASE state WHEN 'unknown' THEN 'parked' ELSE 'open' END
 WHERE state IN ('pending', 'processing', 'unknown');

DROP INDEX semel_keys_in_progress;
DROP INDEX semel_keys_reap;

CREATE INDEX IF NOT EXISTS semel_keys_expiry ON semel_keys (expires_at)
 WHERE after_retention <> 'keep' AND upkeep IS DISTINCT FROM 'parked';
CREATE INDEX IF NOT EXISTS semel_keys_age ON semel_keys (created_at);
CREATE INDEX IF NOT EXISTS semel_keys_upkeep ON semel_keys (upkeep, created_at) WHERE upkeep IS NOT NULL;

CREATE TABLE semel_keys_watermark (
    one      boolean     PRIMARY KEY DEFAULT true CHECK (one),
    swept_to timestamptz NOT NULL
);
