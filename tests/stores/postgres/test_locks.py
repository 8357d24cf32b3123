"""What each statement of a migration locks, by the server's own account; and which statements a migration may have."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext, suppress
from typing import Any

import psycopg
import pytest

from semel.core.record import Hold
from semel.errors import ConfigurationError
from semel.stores.postgres.locks import Lock, faults_of, steps_of
from semel.stores.postgres.statements import PACKAGE
from semel.stores.postgres.store import PostgresStore
from semel.stores.statement import Names, load_migrations
from tests.kit.servers.base import until
from tests.stores.postgres.test_migrating import AFTER, NEXT, claim

#: Made before there was a release, and a rule for them. They are run on tables that are not there yet.
BEFORE_THE_RULE = {"0001_pre_keys", "0002_pre_steps", "0003_pre_accepted", "0004_pre_lean", "0005_pre_messages"}


@pytest.fixture
def postgres_url(migrated_postgres_url: str) -> str:
    return migrated_postgres_url


@pytest.fixture
def server(postgres_url: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        yield connection


class TestLocks:
    SAMPLES = (
        "CREATE TABLE semel_keys_new (a text)",
        "CREATE INDEX semel_keys_new ON semel_keys (owner)",
        "CREATE UNIQUE INDEX semel_keys_new ON semel_keys (token)",
        "DROP INDEX semel_keys_age",
        "DROP INDEX IF EXISTS semel_outbox_due",
        "DROP TABLE semel_webhooks",
        "INSERT INTO semel_keys_watermark (swept_to) VALUES (now())",
        "UPDATE semel_keys SET milestone = NULL",
        "DELETE FROM semel_keys",
        "COMMENT ON TABLE semel_keys IS 'it''s; a comment'",
        "GRANT SELECT, INSERT ON semel_keys TO PUBLIC",
        "CREATE OR REPLACE FUNCTION semel_answers_none() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN END $$",
        "CREATE OR REPLACE TRIGGER a BEFORE UPDATE OF body ON semel_keys EXECUTE FUNCTION semel_move_answer()",
        "DROP TRIGGER IF EXISTS b ON semel_keys",
        "ALTER TABLE semel_keys ADD COLUMN a text",
        "ALTER TABLE semel_keys ADD COLUMN IF NOT EXISTS a text, ADD COLUMN b integer NOT NULL DEFAULT 0",
        "ALTER TABLE semel_keys ADD COLUMN a timestamptz DEFAULT clock_timestamp()",
        "ALTER TABLE semel_keys ADD COLUMN a bigint GENERATED ALWAYS AS IDENTITY",
        "ALTER TABLE semel_keys ADD COLUMN a text CHECK (a <> '')",
        "ALTER TABLE semel_keys ADD CONSTRAINT a CHECK (attempt > 0)",
        "ALTER TABLE semel_keys ADD CONSTRAINT a CHECK (attempt > 0) NOT VALID",
        "ALTER TABLE semel_keys ADD CONSTRAINT a UNIQUE (token)",
        "ALTER TABLE semel_keys ADD CONSTRAINT a UNIQUE USING INDEX semel_keys_spare",
        "ALTER TABLE semel_keys ADD CONSTRAINT a FOREIGN KEY (milestone) REFERENCES semel_webhooks",
        "ALTER TABLE semel_keys ADD CONSTRAINT a FOREIGN KEY (milestone) REFERENCES semel_webhooks NOT VALID",
        "ALTER TABLE semel_keys VALIDATE CONSTRAINT semel_keys_late",
        "ALTER TABLE semel_keys DROP CONSTRAINT semel_keys_shape",
        "ALTER TABLE semel_keys DROP COLUMN milestone",
        "ALTER TABLE semel_keys RENAME COLUMN milestone TO a",
        "ALTER TABLE semel_keys ALTER COLUMN milestone SET DEFAULT ''",
        "ALTER TABLE semel_keys ALTER COLUMN body DROP NOT NULL",
        "ALTER TABLE semel_keys ALTER COLUMN expires_at SET NOT NULL",
        "ALTER TABLE semel_keys ALTER COLUMN owner SET NOT NULL",
        "ALTER TABLE semel_keys ALTER COLUMN scope SET STATISTICS 500",
        "ALTER TABLE semel_keys ALTER COLUMN attempt TYPE bigint",
        "ALTER TABLE semel_keys SET (fillfactor = 50)",
        "ALTER TABLE semel_keys SET (fillfactor = 50), VALIDATE CONSTRAINT semel_keys_late",
    )

    def test_each_kind(self, postgres_url: str, server: psycopg.Connection[Any]) -> None:
        """Every kind of statement locks its table as the plan says, and writes it anew only where the plan says so."""
        server.execute("CREATE UNIQUE INDEX semel_keys_spare ON semel_keys (scope, key)")
        server.execute("ALTER TABLE semel_keys ADD CONSTRAINT semel_keys_late CHECK (attempt > 0) NOT VALID")
        server.execute("CREATE TRIGGER b BEFORE TRUNCATE ON semel_keys EXECUTE FUNCTION semel_move_answer()")
        with closing(PostgresStore(postgres_url)) as store:
            store.perform(claim("k"))
        server.execute("UPDATE semel_keys SET owner = 1")
        for sql in self.SAMPLES:
            with suppress(_Undo), server.transaction():
                self.compare(server, sql)
                raise _Undo

    def test_files(self, empty_postgres_url: str) -> None:
        """So does every statement of every migration that there is."""
        with psycopg.connect(empty_postgres_url, autocommit=True) as server:
            for _, script in load_migrations(PACKAGE, Names()):
                for step in steps_of(script, Names()):
                    with server.transaction() if step.joins else nullcontext():
                        self.compare(server, step.text)

    def test_concurrently(self, postgres_url: str, server: psycopg.Connection[Any]) -> None:
        """An index that is made or dropped CONCURRENTLY keeps none waiting that claims a key."""
        with psycopg.connect(postgres_url) as other, ThreadPoolExecutor() as threads:
            for sql in (
                "CREATE INDEX CONCURRENTLY semel_keys_new ON semel_keys (owner)",
                "DROP INDEX CONCURRENTLY semel_keys_new",
            ):
                other.execute("INSERT INTO semel_keys_watermark (swept_to) VALUES (now())")
                other.execute("DELETE FROM semel_keys")
                (step,) = steps_of(sql, Names())
                run = threads.submit(server.execute, sql.encode())
                until("it has its lock", lambda: bool(_locks(other, "semel_keys", server.info.backend_pid)))
                assert not step.joins
                assert _locks(other, "semel_keys", server.info.backend_pid) == {step.lock.mode}
                with closing(PostgresStore(postgres_url)) as store:
                    assert isinstance(store.perform(claim(sql)), Hold)
                other.rollback()
                run.result()

    def test_unknown(self) -> None:
        """What it is not known of is no migration."""
        for sql in ("VACUUM FULL semel_keys", "ALTER TABLE semel_keys ADD COLUMN a text, CLUSTER ON b"):
            with pytest.raises(ConfigurationError, match="not known what this statement locks"):
                steps_of(sql, Names())

    def test_names(self) -> None:
        """A plan has the names of the store's own tables; an index belongs to the table that it is named after."""
        names = Names("idem", "billing")
        script = "DROP INDEX semel_outbox_due; DROP INDEX semel_keys_age; ALTER TABLE semel_audit DROP COLUMN at"
        tables = [step.table for step in steps_of(names.put_into(script), names)]
        assert tables == ["billing.idem_outbox", "billing.idem", "billing.idem_audit"]

    @staticmethod
    def compare(server: psycopg.Connection[Any], sql: str) -> None:
        (step,) = steps_of(sql, Names())
        oid, file = server.execute(_FILE, [step.table]).fetchall()[0]
        server.execute(sql.encode())
        if step.joins:
            made = oid or server.execute(_FILE, [step.table]).fetchall()[0][0]
            modes = {mode for mode in _locks(server, made) if mode in {each.mode for each in Lock}}
            strongest = max(
                modes, key=lambda mode: next(each for each in Lock if each.mode == mode), default=Lock.NONE.mode
            )
            assert (step.sql, strongest) == (step.sql, step.lock.mode)
        now = server.execute(_FILE, [step.table]).fetchall()[0][1]
        assert (step.sql, step.work == "rewrites") == (step.sql, file is not None and now not in {None, file})


_FILE = "SELECT oid, pg_relation_filenode(oid) FROM (SELECT to_regclass(%s)::oid AS oid) AS it"


class _Undo(Exception):
    """Ends a transaction with ROLLBACK."""


def _locks(server: psycopg.Connection[Any], table: Any, pid: int | None = None) -> set[str]:
    rows = server.execute(
        "SELECT mode FROM pg_locks WHERE locktype = 'relation' AND granted AND relation = %s::regclass AND pid = %s",
        [table, pid or server.info.backend_pid],
    )
    return {mode for (mode,) in rows}


class TestRules:
    def test_every_migration(self) -> None:
        """A migration stops neither a large table nor, if it is run before the new code, the old one."""
        new = [each for each in load_migrations(PACKAGE, Names()) if each[0] not in BEFORE_THE_RULE]
        assert [fault for name, script in new for fault in faults_of(name, script)] == []

    @pytest.mark.parametrize(
        "script",
        [
            "CREATE INDEX semel_keys_new ON semel_keys (owner)",
            "CREATE UNIQUE INDEX CONCURRENTLY semel_keys_new ON semel_keys (token)",
            "DROP INDEX semel_keys_age",
            "DROP TABLE semel_outbox",
            "ALTER TABLE semel_keys DROP COLUMN milestone",
            "ALTER TABLE semel_keys ADD COLUMN a text NOT NULL",
            "ALTER TABLE semel_keys ADD COLUMN a timestamptz DEFAULT clock_timestamp()",
            "ALTER TABLE semel_keys RENAME COLUMN milestone TO a",
            "ALTER TABLE semel_keys ADD CONSTRAINT a CHECK (attempt > 0)",
            "ALTER TABLE semel_keys ALTER COLUMN attempt TYPE bigint",
            "UPDATE semel_keys SET milestone = NULL",
        ],
    )
    def test_refused(self, script: str) -> None:
        """What would is not let through."""
        assert faults_of("9001_pre_bad", script)

    def test_accepted(self) -> None:
        """What only adds is; and so is what says why old code goes on."""
        assert faults_of(*NEXT) == faults_of(*AFTER) == []
        new = "CREATE TABLE semel_counts (a text); CREATE INDEX semel_counts_a ON semel_counts (a)"
        assert faults_of("9001_pre_counts", new) == []
