"""``manage.py migrate`` makes the tables that ``semel migrate`` makes, and either finds the other's done."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from io import StringIO
from typing import Any

import psycopg
import pytest
from django.core.management import call_command
from django.db import connection, connections
from django.test import override_settings

from semel import stores
from semel.core.commands import Begin, Undo
from semel.core.record import Hold
from semel.errors import ConfigurationError, StoreNotReady, StoreUnavailable
from semel.stores.django import DjangoStore, schema
from semel.stores.postgres import migrating
from semel.stores.statement import load_migrations
from tests.django import project
from tests.django.operations import claim_on

ALL = [
    "0001_pre_keys",
    "0002_pre_steps",
    "0003_pre_accepted",
    "0004_pre_lean",
    "0005_pre_messages",
    "0006_pre_trace",
    "0007_pre_counts",
    "0008_pre_answers",
]
#: SQLite has no layouts.
ONLY_POSTGRES = frozenset({"0008_pre_answers"})


def known(wrapper: Any) -> list[str]:
    """The migrations of one kind of database."""
    return [name for name in ALL if wrapper.vendor == "postgresql" or name not in ONLY_POSTGRES]


@pytest.fixture(params=["postgres_url", "sqlite_url"])
def url(request: pytest.FixtureRequest) -> str:
    """An empty database of each kind, in turn."""
    found: str = request.getfixturevalue(request.param)
    return found


def migrate(*arguments: str, **options: Any) -> None:
    call_command("migrate", *arguments, verbosity=0, interactive=False, **options)


def look(url: str) -> list[Any]:
    """Return all that the tables consist of, as the database itself describes it."""
    if url.startswith("sqlite"):
        with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as file:
            return file.execute(
                "SELECT type, name, sql FROM sqlite_master WHERE tbl_name LIKE 'semel%' ORDER BY type, name"
            ).fetchall()
    with psycopg.connect(url) as server:
        columns = server.execute(
            "SELECT table_name, column_name, data_type, is_nullable, column_default, collation_name"
            "  FROM information_schema.columns WHERE table_name LIKE 'semel%' ORDER BY 1, ordinal_position"
        ).fetchall()
        constraints = server.execute(
            "SELECT conname, pg_get_constraintdef(oid) FROM pg_constraint WHERE conrelid::regclass::text LIKE 'semel%'"
            " ORDER BY 1"
        ).fetchall()
        indexes = server.execute("SELECT indexdef FROM pg_indexes WHERE tablename LIKE 'semel%' ORDER BY 1").fetchall()
        return [columns, constraints, indexes]


def test_same_tables(url: str, request: pytest.FixtureRequest) -> None:
    """Column for column, constraint for constraint, they are the same."""
    with project.databases(default=url):
        migrate()
        ours = look(url)
        migrate("semel", "zero")
        assert not [each for each in look(url) if each]
    with closing(stores.store(url)) as store:
        store.migrate()
    assert look(url) == ours


def test_semel_migrate_afterwards(url: str) -> None:
    """Where Django has made the tables, ``semel migrate`` finds nothing to do."""
    with project.databases(default=url):
        migrate("semel")
        assert schema.applied(connection) == known(connection)
    with closing(stores.store(url)) as store:
        assert store.migrate() == []
        assert isinstance(store.perform(claim_on()), Hold)


def test_semel_migrate_before(url: str) -> None:
    """Where ``semel migrate`` was first, Django writes down that it is done, and touches nothing."""
    with closing(stores.store(url)) as store:
        store.migrate()
        hold = store.perform(claim_on())
    before = look(url)
    with project.databases(default=url):
        migrate("semel")
        migrate("semel")
        assert look(url) == before
        found = DjangoStore().perform(claim_on())
        assert not isinstance(found, Hold)
        assert isinstance(hold, Hold)


@pytest.mark.parametrize("count", [1, 2])
def test_some_of_them(url: str, count: int) -> None:
    """A database may stop at each migration, and go on or back from there, with empty tables."""
    last = f"{count:04}"
    with project.databases(default=url):
        migrate("semel", last)
        assert schema.applied(connection) == ALL[:count]
        before = look(url)
        for ask in (DjangoStore().open, lambda: DjangoStore().perform(claim_on())):
            with pytest.raises(StoreNotReady, match=r"or old ones\. Run: python manage\.py migrate semel"):
                ask()
        migrate("semel")
        assert schema.applied(connection) == known(connection)
        DjangoStore().perform(claim_on())
        migrate("semel", last)
        assert look(url) == before
        migrate("semel", "zero")
        assert schema.applied(connection) == []
        migrate("semel")
        assert isinstance(DjangoStore().perform(claim_on()), Hold)


def test_models_are_up_to_date(sqlite: str) -> None:
    """``makemigrations --check`` has nothing to say."""
    said = StringIO()
    call_command("makemigrations", "semel", check=True, dry_run=True, stdout=said)
    assert "No changes" in said.getvalue()


def test_only_where_the_records_are(postgres_url: str, sqlite_url: str) -> None:
    """The tables are made in the database that SEMEL names, and in no other."""
    with project.databases(default=postgres_url, records=sqlite_url), override_settings(SEMEL={"DATABASE": "records"}):
        for alias in ("default", "records"):
            migrate(database=alias)
        assert schema.applied(connections["default"]) == []
        assert schema.applied(connections["records"]) == known(connections["records"])
        DjangoStore("records").open()


class Elsewhere:
    """A router that keeps Semel out."""

    def allow_migrate(self, db: str, app_label: str, **_: Any) -> bool | None:
        return False if app_label == "semel" else None


def test_routers(sqlite_url: str) -> None:
    """A router has the last word."""
    with project.databases(default=sqlite_url), override_settings(DATABASE_ROUTERS=[Elsewhere()]):
        migrate("semel")
        assert schema.applied(connection) == []


def test_another_database_named_later(postgres_url: str, sqlite_url: str) -> None:
    """Where SEMEL names another database than before, the store says how to have its tables made after all."""
    with project.databases(default=postgres_url, records=sqlite_url):
        migrate("semel", database="records")
        with override_settings(SEMEL={"DATABASE": "records"}):
            with pytest.raises(StoreNotReady, match="zero --fake"):
                DjangoStore("records").open()
            migrate("semel", "zero", database="records", fake=True)
            migrate("semel", database="records")
            DjangoStore("records").open()


def test_sqlmigrate(url: str) -> None:
    """``sqlmigrate`` shows what would be run, and runs nothing."""
    with project.databases(default=url):
        said = StringIO()
        for name in ("0001", "0002", "0003"):
            call_command("sqlmigrate", "semel", name, stdout=said)
        assert "CREATE TABLE semel_keys (" in said.getvalue()
        assert "CREATE TABLE semel_audit (" in said.getvalue()
        assert "semel_keys_migrations" in said.getvalue()
        call_command("sqlmigrate", "semel", "0002", backwards=True, stdout=said)
        assert "DROP TABLE IF EXISTS semel_keys" in said.getvalue()
        assert schema.applied(connection) == []


class TestInUse:
    """A migration of a later version, on PostgreSQL."""

    NEXT = "9001_pre_next"
    #: A column; and an index, which can't be part of a transaction.
    COLUMN = "ALTER TABLE semel_keys ADD COLUMN colour text;"
    INDEX = f"{COLUMN} CREATE INDEX CONCURRENTLY semel_keys_colour ON semel_keys (colour);"

    @pytest.fixture
    def bring(self, monkeypatch: pytest.MonkeyPatch, postgres_url: str) -> Iterator[Callable[[str], None]]:
        """Have one more migration, on a database with the tables of this version."""

        def bring(script: str) -> None:
            for module in (schema, migrating):
                monkeypatch.setattr(module, "load_migrations", lambda *at: [*load_migrations(*at), (self.NEXT, script)])

        with project.databases(default=postgres_url):
            migrate("semel")
            yield bring

    def apply(self, *, atomic: bool) -> None:
        with connection.schema_editor(atomic=atomic) as editor:
            schema.apply(editor, self.NEXT)

    def test_each_statement_by_itself(self, bring: Callable[[str], None]) -> None:
        """With ``atomic = False`` statements are run as by ``semel migrate``, and the session is as it was before."""
        bring(self.INDEX)
        before = settings()
        for _ in range(2):
            self.apply(atomic=False)
        assert schema.applied(connection) == [*ALL, self.NEXT]
        assert settings() == before
        with connection.cursor() as cursor:
            cursor.execute("SELECT indisvalid FROM pg_index WHERE indexrelid = 'semel_keys_colour'::regclass")
            assert cursor.fetchall() == [(True,)]
            cursor.execute("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'")
            assert cursor.fetchall() == [(0,)]

    def test_one_transaction(self, bring: Callable[[str], None]) -> None:
        """Otherwise all of it is in Django's transaction; an index that can't be is refused, and nothing is changed."""
        bring(self.INDEX)
        with pytest.raises(ConfigurationError, match="CONCURRENTLY, so it can't be part of a transaction"):
            self.apply(atomic=True)
        assert schema.applied(connection) == known(connection)
        bring(self.COLUMN)
        for _ in range(2):
            self.apply(atomic=True)
        assert schema.applied(connection) == [*ALL, self.NEXT]

    @pytest.mark.parametrize("atomic", [True, False])
    def test_in_the_way(
        self, bring: Callable[[str], None], postgres_url: str, monkeypatch: pytest.MonkeyPatch, *, atomic: bool
    ) -> None:
        """A lock is waited for a short while at a time; who has it is said."""
        bring(self.COLUMN)
        monkeypatch.setattr(migrating, "LOCK_SECONDS", 0.3)
        monkeypatch.setattr(migrating, "WATCH_SECONDS", 0.01)
        monkeypatch.setattr(migrating, "PAUSES", (0.0, 0.0, 0.0))
        with psycopg.connect(postgres_url, application_name="report") as other:
            other.execute("SELECT FROM semel_keys")
            with pytest.raises(StoreUnavailable, match=rf"pid {other.info.backend_pid} \(application report, idle in"):
                self.apply(atomic=atomic)
        self.apply(atomic=atomic)
        assert schema.applied(connection) == [*ALL, self.NEXT]

    def test_half(self, bring: Callable[[str], None]) -> None:
        """A migration that stopped on the way is not applied, and goes on where it stopped."""
        bring(self.INDEX)
        with connection.cursor() as cursor:
            cursor.execute(self.COLUMN)
            cursor.execute(f"INSERT INTO semel_keys_migrations VALUES ('{self.NEXT} (1 of 2)')")
        assert schema.applied(connection) == known(connection)
        self.apply(atomic=False)
        assert schema.applied(connection) == [*ALL, self.NEXT]

    def test_too_new(self, bring: Callable[[str], None]) -> None:
        """Tables that a newer version has taken from are refused, and those that it has added to are not."""
        with connection.cursor() as cursor:
            cursor.execute("INSERT INTO semel_keys_migrations VALUES ('9001_pre_next')")
            DjangoStore().open()
            cursor.execute("INSERT INTO semel_keys_migrations VALUES ('9002_post_after')")
        with pytest.raises(StoreNotReady, match=r"too old \(9002_post_after\)"):
            DjangoStore().open()
        lent = DjangoStore().transaction()
        with pytest.raises(StoreNotReady, match=r"too old \(9002_post_after\)"):
            lent.perform(Begin(claim_on("k")))
        lent.perform(Undo())


def settings() -> list[Any]:
    with connection.cursor() as cursor:
        cursor.execute("SELECT name, setting FROM pg_settings WHERE name ~ 'timeout|search_path' ORDER BY name")
        return list(cursor.fetchall())
