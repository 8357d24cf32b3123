"""What the lean table of PostgreSQL costs, by the server's own counters, and how the services find their work on it."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from semel.core.commands import (
    Begin,
    Browse,
    Claim,
    Complete,
    FindStuck,
    Finish,
    Look,
    Park,
    ReadRequest,
    Reap,
    Reaped,
    Release,
    Resolution,
    Sweep,
    TakeOver,
    Unpark,
    Verdict,
)
from semel.core.message import Answer, Head, Request
from semel.core.record import Found, Hold, Record
from semel.core.recovery import Progress
from semel.core.state import Event, State
from semel.stores import Store, async_store, store
from semel.stores.postgres import upkeep
from semel.stores.postgres.async_store import AsyncPostgresStore
from semel.stores.postgres.statements import PACKAGE, Statements
from semel.stores.postgres.store import PostgresStore
from semel.stores.requests import MAX_REQUEST_LINE
from semel.stores.statement import Names, load_migrations

LEASE, RETENTION = timedelta(seconds=30), timedelta(hours=24)
#: As the servers of the bench answer.
ANSWER = Answer(201, ((b"content-type", b"application/json"),), b'{"id":"order_12345","amount":1000,"currency":"eur"}')
ABANDONED = Answer(408, (), b"")
REQUEST = Request(Head("POST", "/jobs", b"", ()), b"{}", "alice")
MINUTE = timedelta(minutes=1)


def claim(key: str, scope: str = "alice", **more: Any) -> Claim:
    lease = more.pop("lease", LEASE)
    return Claim(scope, key, os.urandom(16), bytes(37), lease, more.pop("retention", RETENTION), **more)


@pytest.fixture
def postgres(postgres_url: str) -> Iterator[PostgresStore]:
    made = PostgresStore(postgres_url)
    made.migrate()
    with made:
        yield made


@pytest.fixture
def operator(postgres: PostgresStore, postgres_url: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        yield connection


def held(postgres: PostgresStore, asked: Claim) -> Hold:
    hold = postgres.perform(asked)
    assert isinstance(hold, Hold), hold
    return hold


def finished(postgres: PostgresStore, asked: Claim) -> Hold:
    hold = held(postgres, asked)
    assert postgres.perform(Complete(hold, Event.COMPLETE, ANSWER)) is Verdict.DONE
    return hold


def record(postgres: Store, key: str) -> Record:
    found = postgres.perform(Look("alice", key))
    assert found is not None
    return found


def stuck(postgres: Store) -> set[str]:
    return {each.hold.key for each in postgres.perform(FindStuck(1000, with_pending=True, with_no_token=True))}


def age(operator: psycopg.Connection[Any], by: timedelta) -> None:
    """Let time go by, for the services as well."""
    times = ("created_at", "lease_expires_at", "completed_at", "expires_at")
    back = ", ".join(f"{each} = {each} - %(by)s" for each in times)
    operator.execute(f"UPDATE semel_keys SET {back}".encode(), {"by": by})
    operator.execute("UPDATE semel_keys_watermark SET swept_to = swept_to - %s", [by])


def left_behind(
    postgres: PostgresStore, operator: psycopg.Connection[Any], left: str, done: Sequence[str], by: timedelta = MINUTE
) -> None:
    """Leave one record and end others while the clock is behind, a long time before it is past the watermark again."""
    held(postgres, claim(left, lease=timedelta(0)))
    for key in done:
        finished(postgres, claim(key))
    back = "created_at = created_at - %(by)s, completed_at = completed_at - %(by)s"
    keys = [left, *done]
    operator.execute(f"UPDATE semel_keys SET {back} WHERE key = ANY (%(keys)s)".encode(), {"by": by, "keys": keys})


def marks(operator: psycopg.Connection[Any]) -> dict[str, str | None]:
    return dict(operator.execute("SELECT key, upkeep FROM semel_keys").fetchall())


class TestCost:
    COUNT = 600
    ROUNDS = 5

    async def test_first_executions(self, postgres_url: str) -> None:
        """Of many first executions at once, nine in ten completions are heap-only; each writes at most 900 bytes of
        WAL; and a replay writes none.
        """
        store(postgres_url).migrate()
        figures: list[tuple[float, float, float]] = []
        with psycopg.connect(postgres_url, autocommit=True) as watcher:
            watcher.execute("ALTER TABLE semel_keys SET (autovacuum_enabled = off)")
            async with AsyncPostgresStore(postgres_url) as postgres:
                await _run_all(postgres, ["warm"])
                # WAL is of the whole server, which writes for itself now and then: so the best of some rounds counts.
                for turn in range(self.ROUNDS):
                    keys = [f"{turn}{number:035}" for number in range(self.COUNT)]
                    watcher.execute("CHECKPOINT")  # The first look at most pages is behind it, or at none at all.
                    before = _wal(watcher)
                    await _run_all(postgres, keys)
                    between = _wal(watcher)
                    await _replay_all(postgres, keys)  # The first to read a page has the server tidy it up, once.
                    tidied = _wal(watcher)
                    await _replay_all(postgres, keys)
                    after = _wal(watcher)
                    written = (between - before, tidied - between, after - tidied)
                    figures.append((written[0] / self.COUNT, written[1] / self.COUNT, written[2] / self.COUNT))
                    first, tidying, replay = map(min, zip(*figures, strict=True))
                    if first <= 900 and tidying < 20 and replay < 1:
                        break
            updated, heap_only = _updates(watcher, len(figures) * self.COUNT)

        assert heap_only >= 0.9 * updated
        assert first <= 900
        assert tidying < 20
        assert replay < 1

    def test_a_completion_leaves_the_indexes_alone(self, operator: Any) -> None:
        """Beside the primary key, no index names a column that completion changes, but for the mark of the few that the
        services look after.
        """
        named = operator.execute(_INDEXED_COLUMNS).fetchall()
        assert {name for (name,) in named} == {"created_at", "expires_at", "after_retention", "upkeep"}


class TestBatches:
    async def test_batch_of_several_policies(self, postgres_url: str) -> None:
        """Claims that go out together keep the terms of their own policies, whatever those of their neighbours are."""
        store(postgres_url).migrate()
        made_at = datetime(2020, 1, 1, tzinfo=UTC)
        claims = [
            claim("plain"),
            claim("long", lease=timedelta(hours=1), retention=timedelta(days=9)),
            claim("refuse", on_crash="refuse"),
            claim("strip", after_retention="strip"),
            claim("old", after_retention="strip", made_at=made_at),
            claim("kept", request=REQUEST),
            claim("accepted", request=REQUEST, is_accepted=True),
            claim("plain", scope="bob"),
        ]
        async with AsyncPostgresStore(postgres_url) as postgres:
            got: list[Any] = await asyncio.gather(*[postgres.perform(each) for each in claims])
            assert got == [Hold(each.scope, each.key, 1, each.token) for each in claims]
            answers = [replace(ANSWER, status=200 + number) for number in range(len(claims))]
            endings = [Complete(hold, Event.COMPLETE, answer) for hold, answer in zip(got, answers, strict=True)]
            endings[3] = replace(endings[3], event=Event.FAIL, wakes=True)
            verdicts = await asyncio.gather(*[postgres.perform(each) for each in endings])
            assert [verdict is Verdict.DONE for verdict in verdicts] == [each.key != "accepted" for each in claims]
            again = await asyncio.gather(*[postgres.perform(each) for each in claims])
        assert [each.answer for each in again if isinstance(each, Found)] == [
            None if each.key == "accepted" else answer for each, answer in zip(claims, answers, strict=True)
        ]
        with psycopg.connect(postgres_url) as connection:
            rows = connection.execute(
                "SELECT key, state, on_crash, after_retention, expires_at - created_at > interval '2 days', upkeep "
                "FROM semel_keys WHERE scope = 'alice' ORDER BY key"
            ).fetchall()
        assert rows == [
            ("accepted", "pending", "rerun", "delete", False, "open"),
            ("kept", "complete", "rerun", "delete", False, None),
            ("long", "complete", "rerun", "delete", True, None),
            ("old", "complete", "rerun", "delete", False, None),
            ("plain", "complete", "rerun", "delete", False, None),
            ("refuse", "complete", "refuse", "delete", False, None),
            ("strip", "failed", "rerun", "strip", False, None),
        ]

    async def test_winners_and_losers_of_one_batch(self, postgres_url: str) -> None:
        """Of keys that are asked for together, in any order and more than once, each caller is told its own outcome."""
        store(postgres_url).migrate()
        async with AsyncPostgresStore(postgres_url) as postgres:
            taken = await postgres.perform(claim("m"))
            assert isinstance(taken, Hold)
            claims = [claim(key) for key in ("z", "m", "a", "z", "m")]
            outcomes: list[Any] = await asyncio.gather(*[postgres.perform(each) for each in claims])
            z, m, a, other_z, other_m = outcomes
            assert (z, a) == (Hold("alice", "z", 1, claims[0].token), Hold("alice", "a", 1, claims[2].token))
            for found, token in ((m, taken.token), (other_m, taken.token), (other_z, claims[0].token)):
                assert isinstance(found, Found)
                assert found.token == token
            zombie = replace(taken, token=bytes(16))
            verdicts = await asyncio.gather(
                *[postgres.perform(Complete(each, Event.COMPLETE, ANSWER)) for each in (z, zombie, a, taken)]
            )
        assert verdicts == [Verdict.DONE, Verdict.FENCED, Verdict.DONE, Verdict.DONE]


class TestRequestLine:
    def test_it_is_kept_with_the_record(self, postgres: PostgresStore, operator: Any) -> None:
        """The line of the request that made a record stays with it, short and in ASCII; else nothing is stored."""
        held(postgres, claim("with", request_line="POST /payments"))
        held(postgres, claim("without"))
        held(postgres, claim("odd", request_line="PUT /caf\u00e9/\ud800\x00" + "x" * 500))
        lines = dict(operator.execute("SELECT key, request_line FROM semel_keys").fetchall())
        assert (record(postgres, "with").request_line, lines["with"]) == ("POST /payments", "POST /payments")
        assert (record(postgres, "without").request_line, lines["without"]) == ("", None)
        assert record(postgres, "odd").request_line == ("PUT /caf\\xe9/\\ud800\\x00" + "x" * 500)[:MAX_REQUEST_LINE]

    def test_a_batch_of_several_lines(self, postgres_url: str) -> None:
        """Requests that are claimed together keep each their own line."""
        store(postgres_url).migrate()
        lines = {"a": "POST /a", "b": "", "c": "POST /c"}

        async def claim_all() -> dict[str, str]:
            async with AsyncPostgresStore(postgres_url) as postgres:
                await asyncio.gather(*[postgres.perform(claim(key, request_line=line)) for key, line in lines.items()])
                return {each.key: each.request_line for each in await postgres.perform(Browse(9))}

        assert asyncio.run(claim_all()) == lines

    def test_a_take_over_keeps_it_and_a_new_operation_has_its_own(self, postgres: PostgresStore, operator: Any) -> None:
        """An operation that another worker goes on with keeps its line; one in place of what expired has its own."""
        dead = held(postgres, claim("k", lease=timedelta(0), request_line="POST /first"))
        heir = postgres.perform(TakeOver(claim("k", request_line="POST /second"), dead))
        assert isinstance(heir, Hold)
        assert record(postgres, "k").request_line == "POST /first"
        age(operator, RETENTION)
        assert isinstance(postgres.perform(TakeOver(claim("k", request_line="POST /third"), heir)), Hold)
        assert record(postgres, "k").request_line == "POST /third"

    def test_atomic_mode_keeps_it(self, postgres: PostgresStore) -> None:
        """A record that was finished in the handler's own transaction has the line, too."""
        asked, lent = claim("k", request_line="POST /rides"), postgres.transaction()
        hold = lent.perform(Begin(asked))
        assert isinstance(hold, Hold)
        assert lent.perform(Finish(asked, hold, None, Event.COMPLETE, ANSWER)) is Verdict.DONE
        assert record(postgres, "k").request_line == "POST /rides"


class TestWatermark:
    def test_only_what_takes_long_is_followed(self, postgres: PostgresStore, operator: Any) -> None:
        """What is young is looked at, and left alone; past the watermark, what is unfinished is followed."""
        held(postgres, claim("long", lease=timedelta(hours=1)))
        finished(postgres, claim("done"))
        assert stuck(postgres) == set()
        assert marks(operator) == {"long": None, "done": None}
        age(operator, MINUTE)
        held(postgres, claim("young", lease=timedelta(0)))
        assert stuck(postgres) == {"young"}
        assert marks(operator) == {"long": "open", "done": None, "young": None}
        age(operator, timedelta(hours=1))
        assert stuck(postgres) == {"long", "young"}
        for key in ("long", "young"):
            found = record(postgres, key)
            heir = postgres.perform(TakeOver(claim(key), Hold("alice", key, found.attempt, found.token)))
            assert isinstance(heir, Hold)
            assert postgres.perform(Complete(heir, Event.COMPLETE, ANSWER)) is Verdict.DONE
        assert stuck(postgres) == set()
        assert set(marks(operator).values()) == {None}

    def test_a_record_is_walked_past_once(self, postgres: PostgresStore, postgres_url: str, operator: Any) -> None:
        """However many have ended, the services read what came since they last looked, and what they follow."""
        operator.execute("ALTER TABLE semel_keys SET (autovacuum_enabled = off)")
        operator.execute(_ENDED, [4000])
        held(postgres, claim("left", lease=timedelta(0)))
        age(operator, MINUTE)
        assert stuck(postgres) == {"left"}
        postgres.close()
        before = _reads(postgres_url)
        for _ in range(5):
            assert stuck(postgres) == {"left"}
            assert [each.key for each in postgres.perform(Browse(9, state=State.PROCESSING))] == ["left"]
        postgres.close()
        assert _reads(postgres_url) - before <= 100

    def test_many_windows(self, postgres: PostgresStore, operator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """A table that was never walked along is walked in windows, one after the other, to its end."""
        monkeypatch.setattr(upkeep, "MAX_WALK", 10)
        monkeypatch.setattr(upkeep, "MIN_WINDOW", 10)
        operator.execute(_ENDED, [95])  # All in one transaction, at one moment.
        for number in range(25):
            finished(postgres, claim(f"done-{number}"))
        held(postgres, claim("left", lease=timedelta(0)))
        age(operator, MINUTE)
        assert stuck(postgres) == {"left"}
        assert marks(operator)["left"] == "open"

    def test_what_is_locked_is_not_walked_past(self, postgres: PostgresStore, postgres_url: str, operator: Any) -> None:
        """A record that an open transaction has locked is neither waited for nor forgotten."""
        held(postgres, claim("locked", lease=timedelta(0)))
        held(postgres, claim("other", lease=timedelta(0)))
        age(operator, MINUTE)
        with psycopg.connect(postgres_url) as holder:
            holder.execute("SELECT FROM semel_keys WHERE key = 'locked' FOR UPDATE")
            assert stuck(postgres) == {"locked", "other"}
            assert marks(operator) == {"locked": None, "other": "open"}
        assert stuck(postgres) == {"locked", "other"}
        assert marks(operator) == {"locked": "open", "other": "open"}

    def test_a_clock_that_was_set_back(self, postgres: PostgresStore, operator: Any) -> None:
        """Where the server's clock is behind the watermark, the services start anew, and miss nothing."""
        assert stuck(postgres) == set()
        operator.execute("UPDATE semel_keys_watermark SET swept_to = now() + interval '1 hour'")
        held(postgres, claim("left", lease=timedelta(0)))
        assert stuck(postgres) == {"left"}
        assert operator.execute("SELECT swept_to < now() FROM semel_keys_watermark").fetchone() == (True,)

    def test_a_clock_that_was_behind_meanwhile(
        self, postgres: PostgresStore, postgres_url: str, operator: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A clock is set back, and is past the watermark again before any service looks. What was left meanwhile is
        found by a service that begins to look, and by one that has not looked for a while.
        """
        stuck(postgres)
        left_behind(postgres, operator, "left", ("done",))
        with PostgresStore(postgres_url) as other:
            assert stuck(other) == {"left"}
        left_behind(postgres, operator, "later", ())
        assert stuck(postgres) == {"left"}  # It has looked all the time: no clock was set back.
        monotonic = time.monotonic
        monkeypatch.setattr(time, "monotonic", lambda: monotonic() + upkeep.SETTLED_SECONDS + 1)
        assert stuck(postgres) == {"left", "later"}
        assert marks(operator) == {"left": "open", "done": None, "later": "open"}

    def test_a_busy_clock_that_was_behind(
        self, postgres: PostgresStore, postgres_url: str, operator: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What was left in such a time is found even if much was made after it: a record that says that it ended
        before the watermark was written, and was written after that, gives the time away.
        """
        monkeypatch.setattr(upkeep, "MAX_BACK", 10)
        stuck(postgres)
        left_behind(postgres, operator, "left", [f"done-{number}" for number in range(25)])
        with PostgresStore(postgres_url) as other:
            assert stuck(other) == {"left"}

    def test_nothing_is_walked_past_again_for_nothing(
        self, postgres: PostgresStore, postgres_url: str, operator: Any
    ) -> None:
        """A service that begins to look goes on where others were: what has ended behind the watermark because it took
        long, or was stripped there, is no sign of a clock.
        """
        operator.execute("ALTER TABLE semel_keys SET (autovacuum_enabled = off)")
        operator.execute(_ENDED, [upkeep.MAX_BACK * 3])
        finished(postgres, claim("stripped"))
        long = held(postgres, claim("long", lease=timedelta(hours=1)))
        held(postgres, claim("longer", lease=timedelta(hours=1)))
        age(operator, MINUTE)
        assert stuck(postgres) == set()
        assert postgres.perform(Complete(long, Event.COMPLETE, ANSWER)) is Verdict.DONE
        operator.execute("UPDATE semel_keys SET after_retention = 'keep' WHERE key = 'stripped'")
        postgres.close()
        before = _reads(postgres_url)
        with PostgresStore(postgres_url) as other:
            assert stuck(other) == set()
        assert _reads(postgres_url) - before <= upkeep.MAX_BACK + 100

    def test_no_watermark_is_written_for_nothing(self, postgres: PostgresStore, operator: Any) -> None:
        """Services that look every second write a few bytes every few seconds."""
        stuck(postgres)
        operator.execute("UPDATE semel_keys_watermark SET swept_to = now() - interval '16 s'")
        before = operator.execute("SELECT xmin, ctid FROM semel_keys_watermark").fetchone()
        for _ in range(3):
            stuck(postgres)
        assert operator.execute("SELECT xmin, ctid FROM semel_keys_watermark").fetchone() == before

    async def test_services_on_a_loop(self, postgres_url: str) -> None:
        """The store for event loops finds the same."""
        store(postgres_url).migrate()
        semel = async_store(postgres_url)
        hold: Any = await semel.perform(claim("left", lease=timedelta(0)))
        assert isinstance(hold, Hold)
        with psycopg.connect(postgres_url, autocommit=True) as operator:
            age(operator, MINUTE)
            assert [each.hold.key for each in await semel.perform(FindStuck(9))] == ["left"]
            assert marks(operator) == {"left": "open"}
        await semel.close()

    def test_parked_records_are_out_of_the_way(self, postgres: PostgresStore, operator: Any) -> None:
        """What is parked is on none of the services' ways, also long past its retention; resolved, it is again."""
        holds = {key: held(postgres, claim(key)) for key in ("again", "resolved", "left")}
        for hold in holds.values():
            assert postgres.perform(Park(hold)) is Verdict.DONE
        assert set(marks(operator).values()) == {"parked"}
        assert {each.key for each in postgres.perform(Browse(9, state=State.UNKNOWN))} == set(holds)
        age(operator, 2 * RETENTION)
        reap = Statements(Names()).of(Reap(10, ABANDONED))
        cursor = psycopg.RawCursor(operator)
        operator.execute("SET enable_seqscan = off")
        plan = cursor.execute(f"EXPLAIN (ANALYZE) {reap.sql}".encode(), reap.parameters).fetchall()
        _, _, walk = "\n".join(line for (line,) in plan).partition("Index Scan using semel_keys_expiry")
        assert "Removed by" not in walk.partition("->")[0]
        assert postgres.perform(Reap(10, ABANDONED)) == Reaped()
        assert postgres.perform(Unpark(holds["again"], Progress())) is Verdict.DONE
        assert postgres.perform(Resolution(holds["resolved"], ANSWER)) is Verdict.DONE
        assert marks(operator) == {"again": "open", "resolved": None, "left": "parked"}
        assert stuck(postgres) == {"again"}
        age(operator, 3 * RETENTION)
        assert postgres.perform(Reap(10, ABANDONED)) == Reaped(deleted=1, failed=1)

    def test_given_up_and_swept_are_followed(self, postgres: PostgresStore, operator: Any) -> None:
        """A record without a worker is found again and again, until somebody ends it."""
        given_up = postgres.perform(TakeOver(claim("given up"), held(postgres, claim("given up", lease=timedelta(0)))))
        assert isinstance(given_up, Hold)
        assert postgres.perform(Release(given_up)) is Verdict.DONE
        assert postgres.perform(Sweep(held(postgres, claim("swept", lease=timedelta(0))))) is Verdict.DONE
        for _ in range(3):
            age(operator, MINUTE)
            assert stuck(postgres) == {"given up", "swept"}


class TestMigration:
    """From the schema before this one, on a table with every state in it."""

    @pytest.fixture
    def old(self, postgres_url: str) -> str:
        with psycopg.connect(postgres_url) as connection:
            connection.execute("CREATE TABLE semel_keys_migrations (name text PRIMARY KEY, applied_at timestamptz)")
            for name, script in load_migrations(PACKAGE, Names()):
                if name < "0004":
                    connection.execute(script.encode())
                    connection.execute("INSERT INTO semel_keys_migrations VALUES (%s, now())", [name])
            connection.execute(_EVERY_STATE)
        return postgres_url

    def test_records_stay_as_they_are(self, old: str) -> None:
        """No record is changed but for the mark of those that the services look after; a second time does nothing."""
        with psycopg.connect(old, autocommit=True) as connection:
            names = [name for (name,) in connection.execute(_COLUMNS).fetchall()]
            everything = f"SELECT {', '.join(names)} FROM semel_keys ORDER BY key".encode()
            before = connection.execute(everything).fetchall()
            with closing(store(old)) as semel:
                assert semel.migrate() == [
                    "0004_pre_lean",
                    "0005_pre_messages",
                    "0006_pre_trace",
                    "0007_pre_counts",
                    "0008_pre_answers",
                ]
                assert semel.migrate() == []
            assert connection.execute(everything).fetchall() == before
            assert {key: mark for key, mark in marks(connection).items() if mark} == {
                "expired in progress": "open",
                "parked": "parked",
                "parked and expired": "parked",
                "pending": "open",
                "processing": "open",
                "stuck with steps": "open",
            }

    def test_records_work_as_before(self, old: str) -> None:
        """Each is replayed, taken over, found, reaped or left alone, as it was before."""
        with closing(store(old)) as semel:
            semel.migrate()
            for key, status in (("complete", 200), ("failed", 500), ("complete with steps", 201), ("stripped", 200)):
                found = semel.perform(claim(key))
                assert isinstance(found, Found)
                assert found.answer is not None
                assert (found.answer.status, found.answer.body) == (status, None if key == "stripped" else b"ok")
            assert {each.key for each in semel.perform(Browse(9, state=State.UNKNOWN))} == {
                "parked",
                "parked and expired",
            }
            assert stuck(semel) == {"pending", "stuck with steps"}
            (due,) = (each for each in semel.perform(FindStuck(9)) if each.hold.key == "stuck with steps")
            assert semel.perform(ReadRequest(due.hold)) is not None
            heir = semel.perform(TakeOver(claim("stuck with steps"), due.hold))
            assert isinstance(heir, Hold)
            assert semel.perform(Complete(heir, Event.COMPLETE, ANSWER)) is Verdict.DONE
            assert semel.perform(Reap(10, ABANDONED)) == Reaped(deleted=1, stripped=1, failed=1)
            assert semel.perform(Reap(10, ABANDONED)) == Reaped(deleted=1)
            assert semel.perform(Reap(10, ABANDONED)) == Reaped()
            assert record(semel, "processing").state is State.PROCESSING

    def test_prepared_beforehand(self, old: str) -> None:
        """Columns and indexes that were made while requests went on are found, and not made again."""
        with psycopg.connect(old, autocommit=True) as connection:
            connection.execute(
                'ALTER TABLE semel_keys ADD COLUMN request_line text, ADD COLUMN upkeep text COLLATE "C"'
            )
            connection.execute("CREATE INDEX CONCURRENTLY semel_keys_age ON semel_keys (created_at)")
            connection.execute(
                "CREATE INDEX CONCURRENTLY semel_keys_expiry ON semel_keys (expires_at) "
                "WHERE after_retention <> 'keep' AND upkeep IS DISTINCT FROM 'parked'"
            )
            made = connection.execute(_INDEXES).fetchall()
            with closing(store(old)) as semel:
                semel.migrate()
            assert connection.execute(_INDEXES).fetchall() == made
            assert len(made) == 2

    def test_an_old_process_goes_on(self, old: str) -> None:
        """What the release before says to claim and to complete works on the new table: a deploy replaces processes one
        by one.
        """
        with closing(store(old)) as semel, psycopg.connect(old, autocommit=True) as connection:
            semel.migrate()
            connection.execute(_OLD_CLAIM)
            connection.execute(_OLD_COMPLETE)
            found = semel.perform(claim("old process"))
            assert isinstance(found, Found)
            assert found.answer == Answer(201, (), b"ok")


async def _run_all(postgres: AsyncPostgresStore, keys: list[str]) -> None:
    waiting = iter(keys)

    async def work() -> None:
        for key in waiting:
            hold = await postgres.perform(claim(key, request_line="POST /orders"))
            assert isinstance(hold, Hold)
            assert await postgres.perform(Complete(hold, Event.COMPLETE, ANSWER)) is Verdict.DONE

    await asyncio.gather(*[work() for _ in range(64)])


async def _replay_all(postgres: AsyncPostgresStore, keys: list[str]) -> None:
    for key in keys:
        found: Any = await postgres.perform(claim(key, request_line="POST /orders"))
        assert isinstance(found, Found)


def _wal(connection: psycopg.Connection[Any]) -> int:
    [(position,)] = connection.execute("SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint").fetchall()
    return int(position)


def _updates(connection: psycopg.Connection[Any], count: int) -> tuple[int, int]:
    """How many rows were updated, and how many of them heap-only, once all who did it have handed their counts in."""
    while True:
        [(updated, heap_only)] = connection.execute(
            "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = 'semel_keys'"
        ).fetchall()
        if updated >= count:
            return updated, heap_only
        time.sleep(0.01)


def _reads(url: str) -> int:
    """How many rows and index entries were read so far, by all who have disconnected."""
    with psycopg.connect(url, autocommit=True) as connection:
        others = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'semel'"
        while connection.execute(others).fetchall():
            time.sleep(0.005)
        [(entries, rows)] = connection.execute(
            "SELECT (SELECT sum(idx_tup_read) FROM pg_stat_user_indexes WHERE relname = 'semel_keys'), "
            "seq_tup_read + idx_tup_fetch FROM pg_stat_user_tables WHERE relname = 'semel_keys'"
        ).fetchall()
    return int(max(entries, rows))


_COLUMNS = (
    "SELECT column_name FROM information_schema.columns WHERE table_name = 'semel_keys' ORDER BY ordinal_position"
)
_INDEXES = (
    "SELECT indexrelid FROM pg_index WHERE indexrelid IN ('semel_keys_age'::regclass, 'semel_keys_expiry'::regclass) "
    "AND indisvalid"
)
_INDEXED_COLUMNS = """
SELECT DISTINCT attname
  FROM pg_index
  JOIN pg_depend ON objid = indexrelid AND refobjid = indrelid
  JOIN pg_attribute ON attrelid = refobjid AND attnum = refobjsubid
 WHERE indrelid = 'semel_keys'::regclass
"""

_ENDED = """
INSERT INTO semel_keys
       (scope, key, state, attempt, token, fingerprint, status, headers, created_at, completed_at, expires_at)
SELECT 'alice', 'ended-' || n, 'complete', 1, decode(md5(n::text), 'hex'), '', 200, '[]', now(), now(),
       now() + interval '1 day'
  FROM generate_series(1, %s) AS n
"""

_EVERY_STATE = b"""
INSERT INTO semel_keys (scope, key, state, attempt, token, fingerprint, recovery_point, status, headers, body,
                        created_at, lease_expires_at, completed_at, expires_at, steps, on_crash, after_retention,
                        request, request_body, tries, accepted, milestone, owner)
SELECT 'alice', key, state, attempt, decode(md5(key), 'hex'), '\\x02aabb', point, status, headers, body,
       now() - interval '1 hour', now() + lease, ended, now() + retention, steps, on_crash, fate, request, request_body,
       tries, accepted, milestone, owner
  FROM (VALUES
    ('pending', 'pending', 1, NULL, NULL::smallint, NULL, NULL::bytea, NULL::interval, NULL::timestamptz,
     interval '1 day', NULL, 'rerun', 'delete', '{"method":"POST","path":"/","query":"","headers":[],"principal":"a"}',
     ''::bytea, 0, true, NULL, NULL::bigint),
    ('processing', 'processing', 2, NULL, NULL, NULL, NULL, interval '1 hour', NULL, interval '1 day', NULL, 'refuse',
     'strip', NULL, NULL, 0, false, '{"fraction":0.5,"note":null}', 42),
    ('stuck with steps', 'processing', 3, 'ride_created', NULL, NULL, NULL, interval '-1 s', NULL, interval '1 day',
     '[]', 'rerun', 'delete', '{"method":"POST","path":"/","query":"","headers":[],"principal":"a"}', 'body', 1, false,
     NULL, NULL),
    ('expired in progress', 'processing', 1, NULL, NULL, NULL, NULL, interval '-1 s', NULL, interval '-1 s', NULL,
     'rerun', 'delete', NULL, NULL, 0, false, NULL, NULL),
    ('parked', 'unknown', 1, NULL, NULL, NULL, NULL, NULL, NULL, interval '1 day', '[]', 'rerun', 'delete', NULL, NULL,
     0, false, NULL, NULL),
    ('parked and expired', 'unknown', 1, NULL, NULL, NULL, NULL, NULL, NULL, interval '-1 day', NULL, 'refuse',
     'delete', NULL, NULL, 0, false, NULL, NULL),
    ('complete', 'complete', 1, NULL, 200, '[]', 'ok', NULL, now(), interval '1 day', NULL, 'rerun', 'delete', NULL,
     NULL, 0, false, NULL, NULL),
    ('complete with steps', 'complete', 2, 'ride_created', 201, '[["a","b"]]', 'ok', NULL, now(), interval '1 day',
     '[]', 'rerun', 'delete', NULL, NULL, 0, true, NULL, NULL),
    ('failed', 'failed', 1, NULL, 500, '[]', 'ok', NULL, now(), interval '1 day', NULL, 'rerun', 'delete', NULL, NULL,
     0, false, NULL, NULL),
    ('stripped', 'complete', 1, NULL, 200, '[]', NULL, NULL, now(), interval '-1 day', NULL, 'rerun', 'keep', NULL,
     NULL, 0, false, NULL, NULL),
    ('to be stripped', 'complete', 1, NULL, 200, '[]', 'ok', NULL, now(), interval '-1 s', NULL, 'rerun', 'strip', NULL,
     NULL, 0, false, NULL, NULL),
    ('to be deleted', 'failed', 1, NULL, 404, '[]', 'ok', NULL, now(), interval '-1 s', NULL, 'rerun', 'delete', NULL,
     NULL, 0, false, NULL, NULL)
  ) AS old (key, state, attempt, point, status, headers, body, lease, ended, retention, steps, on_crash, fate, request,
            request_body, tries, accepted, milestone, owner)
"""

_OLD_CLAIM = """
INSERT INTO semel_keys (scope, key, state, attempt, token, fingerprint, created_at, lease_expires_at, expires_at,
                        on_crash, after_retention, request, request_body, accepted, owner)
VALUES ('alice', 'old process', 'processing', 1, decode(repeat('01', 16), 'hex'), '', now(), now(),
        now() + interval '1 day', 'rerun', 'delete', NULL, NULL, false, NULL)
"""
_OLD_COMPLETE = """
UPDATE semel_keys
   SET state = 'complete', status = 201, headers = '[]', body = 'ok', completed_at = clock_timestamp(),
       lease_expires_at = NULL, owner = NULL, request = NULL, request_body = NULL
 WHERE scope = 'alice' AND key = 'old process' AND state || '' = 'processing'
"""
