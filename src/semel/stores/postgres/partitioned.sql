-- The partitioned layout: bodies of more than a kilobyte are in semel_answers, in a partition for the UTC day on which
-- they expire, and are dropped with it instead of deleted. Keys stay one table with one primary key.
CREATE TABLE IF NOT EXISTS semel_answers (
    day   date  NOT NULL,   -- of the record's expires_at
    token bytea NOT NULL,   -- of the attempt
    body  bytea NOT NULL,

    PRIMARY KEY (day, token)
) PARTITION BY LIST (day);

-- Where a partition is missing, because no reaper runs, the answer goes here: no request fails for it.
CREATE TABLE IF NOT EXISTS semel_answers_rest PARTITION OF semel_answers DEFAULT;

SELECT made FROM semel_rotate_answers('-infinity', 0, true);

-- A body of so many bytes leaves no room on its page for the others, so that their answers are no heap-only updates.
-- The second condition is for what clears a body: then there is none elsewhere.
CREATE OR REPLACE TRIGGER semel_keys_answer
    BEFORE INSERT OR UPDATE OF body ON semel_keys
    FOR EACH ROW WHEN (octet_length(NEW.body) > 1024 OR NEW.answer_day IS NOT NULL)
    EXECUTE FUNCTION semel_move_answer(1024);
