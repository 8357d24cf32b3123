-- Where an answer is: NULL says in the row, a day says in the partition of that day of semel_answers, a table that only
-- the partitioned layout has (partitioned.sql). And the functions of that layout, which do nothing without it: so no
-- process has to know which layout there is.
ALTER TABLE semel_keys ADD COLUMN IF NOT EXISTS answer_day date;

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
