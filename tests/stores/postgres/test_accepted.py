"""Accepted operations on PostgreSQL: who is told of what, what the table allows, and how it came to that."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from psycopg import errors

from semel.core.commands import Begin, Claim, Command, Complete, FindStuck, Finish, Look, Release, TakeOver, Verdict
from semel.core.hint import hint_of
from semel.core.message import Answer, Head, Request
from semel.core.record import Found, Hold
from semel.core.state import Event
from semel.errors import StoreNotReady
from semel.stores import async_store
from semel.stores.postgres.address import SESSION
from semel.stores.postgres.signals import channel_of
from semel.stores.postgres.statements import PACKAGE, Statements
from semel.stores.postgres.store import PostgresStore
from semel.stores.statement import Names, load_migrations

LEASE, RETENTION = timedelta(seconds=30), timedelta(hours=24)
ANSWER = Answer(201, (), b"{}")
REQUEST = Request(Head("POST", "/jobs", b"", ()), b"{}", "alice")
HINT = hint_of("alice", "k")


def claim(key: str = "k", **more: Any) -> Claim:
    return Claim("alice", key, os.urandom(16), b"fingerprint", LEASE, RETENTION, **more)


def accepted(key: str = "k") -> Claim:
    return claim(key, request=REQUEST, is_accepted=True)


@pytest.fixture
def postgres(postgres_url: str) -> Iterator[PostgresStore]:
    made = PostgresStore(postgres_url)
    made.migrate()
    with made:
        yield made


class Listener:
    """Whoever listens on a channel."""

    def __init__(self, url: str, names: Names) -> None:
        self._channel = channel_of(names)
        self._connection = psycopg.connect(url, autocommit=True)
        self._connection.execute(f"LISTEN {self._channel}".encode())

    def told(self) -> list[str]:
        """What was said since the last time. It comes in the order of the commits, so it is all before our own word."""
        self._connection.execute("SELECT pg_notify(%s, 'that is all')", [self._channel])
        said = iter(self._connection.notifies())
        return list(iter(lambda: next(said).payload, "that is all"))

    def close(self) -> None:
        self._connection.close()


@pytest.fixture
def listener(postgres_url: str) -> Iterator[Listener]:
    made = Listener(postgres_url, Names())
    yield made
    made.close()


def held(postgres: PostgresStore, asked: Claim) -> Hold:
    hold = postgres.perform(asked)
    assert isinstance(hold, Hold)
    return hold


class TestHints:
    def test_end_is_told(self, postgres: PostgresStore, listener: Listener) -> None:
        """Where somebody may wait for it, the end of an operation is told to whoever listens: its name, and no more."""
        postgres.perform(Complete(held(postgres, claim()), Event.COMPLETE, ANSWER, wakes=True))
        assert listener.told() == [HINT]

    def test_freed_key_is_told(self, postgres: PostgresStore, listener: Listener) -> None:
        """A key that is free again is told as well; a release that frees nothing is not."""
        hold = held(postgres, claim())
        postgres.perform(Release(Hold("alice", "k", 1, os.urandom(16)), wakes=True))
        assert listener.told() == []
        postgres.perform(Release(hold, wakes=True))
        assert listener.told() == [HINT]
        postgres.perform(Release(hold, wakes=True))
        assert listener.told() == []

    def test_new_work_is_told(self, postgres: PostgresStore, listener: Listener, postgres_url: str) -> None:
        """Workers are told that there is something to begin, also in place of a record that expired."""
        asked = accepted()
        hold = held(postgres, asked)
        assert listener.told() == ["accepted"]
        postgres.perform(accepted())
        assert listener.told() == []
        with psycopg.connect(postgres_url) as connection:
            connection.execute("UPDATE semel_keys SET expires_at = now()")
        assert isinstance(postgres.perform(TakeOver(accepted(), hold)), Hold)
        assert listener.told() == ["accepted"]

    def test_nobody_is_told_unasked(self, postgres: PostgresStore, listener: Listener) -> None:
        """Without a wish nothing is said: a transaction that notifies anybody waits for all others that do."""
        first, second = held(postgres, claim()), held(postgres, claim("l"))
        postgres.perform(Complete(first, Event.COMPLETE, ANSWER))
        postgres.perform(Release(second))
        postgres.perform(claim())
        assert listener.told() == []

    def test_only_what_was_stored_is_told(self, postgres: PostgresStore, listener: Listener) -> None:
        """An answer that is fenced off has ended nothing."""
        held(postgres, claim())
        stranger = Hold("alice", "k", 1, os.urandom(16))
        assert postgres.perform(Complete(stranger, Event.COMPLETE, ANSWER, wakes=True)) is Verdict.FENCED
        assert listener.told() == []

    @pytest.mark.parametrize("wakes", [True, False])
    def test_end_of_a_transaction_is_told(self, postgres: PostgresStore, listener: Listener, wakes: bool) -> None:
        """In atomic mode it is told with the application's own commit, and not before."""
        asked = claim()
        transaction = postgres.transaction()
        hold = transaction.perform(Begin(asked))
        assert isinstance(hold, Hold)
        assert listener.told() == []
        assert transaction.perform(Finish(asked, hold, None, Event.COMPLETE, ANSWER, wakes)) is Verdict.DONE
        assert listener.told() == [HINT] * wakes

    def test_each_table_has_its_channel(self, postgres: PostgresStore, postgres_url: str) -> None:
        """What is told of one table's keys, those of another don't hear. A channel's name fits, however long theirs."""
        names = Names("t" * 48, "s" * 48)
        assert len(channel_of(names)) < 63
        listener = Listener(postgres_url, names)
        held(postgres, accepted())
        assert listener.told() == []
        with closing(PostgresStore(f"{postgres_url}?schema={names.schema}&table={names.table}")) as other:
            other.migrate()
            held(other, accepted())
        assert listener.told() == ["accepted"]
        listener.close()


class TestSchema:
    @pytest.mark.parametrize(
        "wrong, rule",
        [
            ("lease_expires_at = NULL", "semel_keys_shape"),
            ("state = 'complete', lease_expires_at = NULL", "semel_keys_shape"),
            ("status = 200, headers = '[]'", "semel_keys_shape"),
            ("state = 'done'", "semel_keys_shape"),
            ("token = ''", "semel_keys_token"),
        ],
    )
    def test_rules(self, postgres: PostgresStore, postgres_url: str, wrong: str, rule: str) -> None:
        """The table refuses what no record may be, whoever writes it."""
        held(postgres, claim(request=REQUEST))
        with psycopg.connect(postgres_url) as connection, pytest.raises(errors.CheckViolation, match=rule):
            connection.execute(f"UPDATE semel_keys SET {wrong}".encode())

    def test_older_table_keeps_its_records(self, postgres_url: str) -> None:
        """Records that were there before the migration stay as they are, and work as before: none was accepted."""
        _migrated_up_to(postgres_url, "0003")
        with psycopg.connect(postgres_url) as connection:
            connection.execute(_OLD_ROWS)
            for name, script in load_migrations(PACKAGE, Names()):
                if name >= "0003":
                    connection.execute(script.encode())
        with PostgresStore(postgres_url) as store:
            for key, state in (("done", "complete"), ("running", "processing"), ("parked", "unknown")):
                record = store.perform(Look("alice", key))
                assert record is not None
                assert (record.state, record.is_accepted, record.milestone) == (state, False, None)
            found = store.perform(claim("done"))
            assert isinstance(found, Found)
            assert (found.answer, found.attempt, found.is_accepted) == (Answer(200, (), b"ok"), 2, False)
            (stuck,) = store.perform(FindStuck(9, with_request=True, with_pending=True))
            assert isinstance(store.perform(TakeOver(claim("running"), stuck.hold)), Hold)

    @pytest.mark.parametrize(
        "command",
        [Look("alice", "k"), claim(), FindStuck(9), Complete(Hold("alice", "k", 1, bytes(16)), Event.COMPLETE, ANSWER)],
        ids=lambda each: type(each).__name__,
    )
    async def test_older_table_says_what_to_do(self, postgres_url: str, command: Command[Any]) -> None:
        """On a table of an older release, the first statement says which command brings it up to date."""
        _migrated_up_to(postgres_url, "0004")
        old = pytest.raises(StoreNotReady, match=r"or an old one\. Run: semel migrate postgresql://")
        with closing(PostgresStore(postgres_url)) as store, old:
            store.perform(command)
        on_a_loop = async_store(postgres_url)
        with pytest.raises(StoreNotReady, match="semel migrate postgresql://"):
            await on_a_loop.perform(command)
        await on_a_loop.close()

    async def test_older_table_is_told_at_the_start(self, postgres_url: str) -> None:
        """Whoever opens the store before its first request is told then."""
        _migrated_up_to(postgres_url, "0004")
        with pytest.raises(StoreNotReady):
            PostgresStore(postgres_url).open()
        with pytest.raises(StoreNotReady):
            await async_store(postgres_url).open()

    @pytest.mark.parametrize("is_analysed", [True, False], ids=["analysed", "not analysed"])
    def test_pending_are_found_through_the_index(self, postgres_url: str, is_analysed: bool) -> None:
        """Among many records that have ended, workers find what is pending without reading through them: of those that
        are younger than the watermark, a few thousand at most.
        """
        with closing(PostgresStore(postgres_url)) as store:
            store.migrate()
        wanted = FindStuck(1000, with_request=True, with_no_token=True, with_pending=True, only_due=True)
        statement = Statements(Names()).of(wanted)
        with psycopg.connect(postgres_url, autocommit=True, cursor_factory=psycopg.RawCursor) as connection:
            for setting, value in SESSION.items():
                connection.execute("SELECT set_config($1, $2, false)", [setting, value])
            connection.execute("SET plan_cache_mode = force_generic_plan")
            connection.execute(_MANY)
            connection.execute("INSERT INTO semel_keys_watermark VALUES (true, now() + interval '1 s')")
            if is_analysed:
                connection.execute("ANALYZE semel_keys")
            lines = connection.execute(f"EXPLAIN (ANALYZE) {statement.sql}".encode(), statement.parameters)
            plan = "\n".join(line for (line,) in lines)
        assert "Seq Scan" not in plan
        assert "semel_keys_upkeep" in plan
        assert "Removed by" not in plan  # It reads those that it returns, and no others.


class TestTurns:
    def test_backlog_hides_no_other_scope(
        self, postgres: PostgresStore, postgres_url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Where one scope has more to do than one look reads, later looks find what other scopes have behind it."""
        monkeypatch.setattr("semel.stores.postgres.upkeep.MIN_WINDOW", 10)
        for number in range(60):
            held(postgres, accepted(f"{number}"))
        held(postgres, replace(accepted("other"), scope="bob"))
        with psycopg.connect(postgres_url) as connection:  # One a second, and the last one has just been accepted.
            connection.execute(
                "UPDATE semel_keys SET created_at = created_at - (60 - key::int) * interval '1 s' WHERE scope = 'alice'"
            )
        wanted = FindStuck(3, with_request=True, with_no_token=True, with_pending=True, only_due=True)
        looks = [[each.hold.scope for each in postgres.perform(wanted)] for _ in range(100)]
        assert all(len(look) == 3 for look in looks)
        assert sum(look[:2] == ["alice", "bob"] for look in looks) > 0


def _migrated_up_to(url: str, before: str) -> None:
    with psycopg.connect(url) as connection:
        for name, script in load_migrations(PACKAGE, Names()):
            if name < before:
                connection.execute(script.encode())


_OLD_ROWS = b"""
INSERT INTO semel_keys (scope, key, state, attempt, token, fingerprint, status, headers, body,
                        created_at, lease_expires_at, completed_at, expires_at, steps, request, request_body)
VALUES ('alice', 'done', 'complete', 2, decode(repeat('01', 16), 'hex'), 'fingerprint', 200, '[]', 'ok',
        now(), NULL, now(), now() + interval '1 hour', NULL, NULL, NULL),
       ('alice', 'running', 'processing', 1, decode(repeat('02', 16), 'hex'), 'fingerprint', NULL, NULL, NULL,
        now(), now(), NULL, now() + interval '1 hour', '[]', '{}', ''),
       ('alice', 'parked', 'unknown', 1, decode(repeat('03', 16), 'hex'), 'fingerprint', NULL, NULL, NULL,
        now(), NULL, NULL, now() + interval '1 hour', NULL, NULL, NULL)
"""

_MANY = """
WITH ended AS (
    INSERT INTO semel_keys
           (scope, key, state, attempt, token, fingerprint, status, headers, created_at, completed_at, expires_at)
    SELECT 'alice', 'k' || n, 'complete', 1, decode(md5(n::text), 'hex'), '', 200, '[]', now(), now(),
           now() + interval '1 day'
      FROM generate_series(1, 20000) AS n
)
INSERT INTO semel_keys
       (scope, key, state, attempt, token, fingerprint, created_at, expires_at, request, request_body, accepted, upkeep)
SELECT 'alice', 'p' || n, 'pending', 1, decode(md5(n::text), 'hex'), '', now(), now() + interval '1 day', '{}', '',
       true, 'open'
  FROM generate_series(1, 20) AS n
"""
