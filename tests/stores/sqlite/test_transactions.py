"""Transactions of the application's own on a SQLite file: what the handler writes, and who waits for whom."""

import asyncio
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy

from semel.core.commands import (
    Begin,
    Claim,
    Command,
    Commit,
    Complete,
    Finish,
    Look,
    Open,
    ReadTrail,
    Release,
    Settle,
    Undo,
    Verdict,
)
from semel.core.message import Answer
from semel.core.record import Found, Hold
from semel.core.recovery import Done, Progress
from semel.core.state import Event, State
from semel.errors import CommitUnknown, ConfigurationError, StoreUnavailable
from semel.stores.connections.sqlite import SQLiteConnections
from semel.stores.sqlite import AsyncSQLiteStore, SQLiteStore, file
from semel.stores.sqlite.file import locate
from semel.stores.sqlite.statements import SQLiteJoins, Statements
from semel.stores.statement import Joined, Names
from semel.stores.transaction import AsyncTransaction, Transaction

LEASE = timedelta(seconds=30)
RETENTION = timedelta(hours=24)
ANSWER = Answer(201, ((b"x-name", b"\xe9"),), b"made")
STEPS = Progress((Done("phase", "ride_created", {"id": 1}),))
#: Somebody who waits in vain need not wait long.
SHORT = timedelta(milliseconds=50)


def a_claim(key: str = "key", fingerprint: bytes = b"print") -> Claim:
    return Claim("scope", key, os.urandom(16), fingerprint, LEASE, RETENTION)


def begun(transaction: Transaction, claim: Claim) -> Hold:
    hold = transaction.perform(Begin(claim))
    assert isinstance(hold, Hold)
    return hold


def finish(claim: Claim, hold: Hold) -> Finish:
    return Finish(claim, hold, None, Event.COMPLETE, ANSWER)


def finished(store: SQLiteStore, key: str = "key") -> None:
    transaction, claim = store.transaction(), a_claim(key)
    assert transaction.perform(finish(claim, begun(transaction, claim))) is Verdict.DONE


@pytest.fixture
def path(sqlite_url: str) -> Path:
    path = Path(sqlite_url.removeprefix("sqlite:///"))
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE rides (id INTEGER PRIMARY KEY, driver INTEGER)")
    return path


@pytest.fixture
def store(sqlite_url: str, path: Path) -> Iterator[SQLiteStore]:
    with SQLiteStore(sqlite_url) as store:
        yield store


@pytest.fixture
def rival(sqlite_url: str, store: SQLiteStore) -> Iterator[SQLiteStore]:
    """Another store on the same file, as another process has one."""
    with SQLiteStore(sqlite_url) as rival:
        yield rival


def rides(path: Path) -> int:
    with closing(sqlite3.connect(path)) as connection:
        ((count,),) = connection.execute("SELECT count(*) FROM rides").fetchall()
        return int(count)


class TestTogether:
    def test_the_record_and_the_business_commit_together(self, store: SQLiteStore, path: Path) -> None:
        """What the handler wrote is there when the record is, and neither is before."""
        transaction, claim = store.transaction(), a_claim()
        hold = begun(transaction, claim)
        transaction.connection.execute("INSERT INTO rides DEFAULT VALUES")
        assert (rides(path), store.perform(Look("scope", "key"))) == (0, None)
        assert transaction.perform(finish(claim, hold)) is Verdict.DONE
        record = store.perform(Look("scope", "key"))
        assert record is not None
        assert (rides(path), record.answer) == (1, ANSWER)

    def test_what_is_undone_is_undone_together(self, store: SQLiteStore, path: Path) -> None:
        """Neither the business nor the record nor a line in the trail stays of what was undone."""
        transaction = store.transaction()
        begun(transaction, a_claim())
        transaction.connection.execute("INSERT INTO rides DEFAULT VALUES")
        transaction.perform(Undo())
        assert (rides(path), store.perform(Look("scope", "key"))) == (0, None)
        assert store.perform(ReadTrail("scope", "key")) == ()

    def test_a_phase_and_its_step_commit_together(self, store: SQLiteStore, path: Path) -> None:
        """What a phase wrote is there when its step is; and of a phase that lost its hold, nothing."""
        hold = store.perform(a_claim())
        assert isinstance(hold, Hold)
        for mine, verdict, count in (
            (hold, Verdict.DONE, 1),
            (Hold("scope", "key", 1, os.urandom(16)), Verdict.FENCED, 1),
        ):
            transaction = store.transaction()
            transaction.perform(Open())
            transaction.connection.execute("INSERT INTO rides DEFAULT VALUES")
            assert transaction.perform(Commit(mine, STEPS)) is verdict
            assert rides(path) == count

    def test_finish_that_is_fenced_undoes_the_business(self, store: SQLiteStore, path: Path) -> None:
        """Where somebody else has written the record, what the handler wrote goes."""
        finished(store)
        transaction, claim = store.transaction(), a_claim()
        transaction.perform(Open())
        transaction.connection.execute("INSERT INTO rides DEFAULT VALUES")
        assert transaction.perform(finish(claim, Hold("scope", "key", 1, claim.token))) is Verdict.FENCED
        assert rides(path) == 0

    @pytest.mark.parametrize("how", ["commit", "rollback", "with", "executescript"])
    def test_the_handler_can_not_end_it(self, store: SQLiteStore, path: Path, how: str) -> None:
        """The usual ways to end a transaction are refused, since half of it would stay; the rest goes on."""
        transaction, claim = store.transaction(), a_claim()
        hold = begun(transaction, claim)
        connection: sqlite3.Connection = transaction.connection
        connection.execute("INSERT INTO rides DEFAULT VALUES")
        ways: dict[str, Callable[[], Any]] = {
            "commit": connection.commit,
            "rollback": connection.rollback,
            "with": connection.__enter__,
            "executescript": partial(connection.executescript, "SELECT 1"),
        }
        with pytest.raises(ConfigurationError, match="Semel ends this transaction"):
            ways[how]()
        assert transaction.perform(finish(claim, hold)) is Verdict.DONE
        assert rides(path) == 1

    def test_an_end_in_sql_is_found_out(self, store: SQLiteStore) -> None:
        """A handler that ends the transaction in SQL gets an error, and no record that says otherwise is written."""
        transaction, claim = store.transaction(), a_claim()
        hold = begun(transaction, claim)
        transaction.connection.execute("COMMIT")
        with pytest.raises(ConfigurationError, match="was ended in the middle"):
            transaction.perform(finish(claim, hold))
        transaction.perform(Undo())
        assert store.perform(Look("scope", "key")) is None

    def test_the_connection_is_as_new(self, store: SQLiteStore, path: Path) -> None:
        """What one handler sets on the connection, or leaves half read, is no trouble to the next."""
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.executemany("INSERT INTO rides (id) VALUES (?)", [(number,) for number in range(1000)])
        transaction, claim = store.transaction(), a_claim("first")
        hold = begun(transaction, claim)
        transaction.connection.row_factory = lambda _cursor, _row: {}
        half_read = transaction.connection.execute("SELECT * FROM rides")
        half_read.fetchone()
        assert transaction.perform(finish(claim, hold)) is Verdict.DONE
        with SQLiteStore(f"sqlite:///{path}") as other:
            finished(other, "between")
        assert isinstance(store.transaction().perform(Begin(a_claim("between"))), Found)
        second = store.transaction()
        hold = begun(second, claim := a_claim("second"))
        assert second.connection.execute("SELECT 1").fetchall() == [(1,)]
        assert second.perform(finish(claim, hold)) is Verdict.DONE
        del half_read


class TestWaiting:
    def test_a_replay_does_not_wait(self, store: SQLiteStore, rival: SQLiteStore) -> None:
        """While a slow handler holds the write lock, answers are given, in its process and in others."""
        finished(store, "old")
        slow = store.transaction()
        begun(slow, a_claim("slow"))
        for each in (store, rival):
            found = each.transaction().perform(Begin(a_claim("old")))
            assert isinstance(found, Found)
            assert found.answer == ANSWER
        slow.perform(Undo())

    def test_another_process_waits_and_reads(self, store: SQLiteStore, rival: SQLiteStore) -> None:
        """A duplicate in another process waits for the write lock, and then finds the answer."""
        first, claim = store.transaction(), a_claim()
        hold = begun(first, claim)
        asked = threading.Event()

        def ask() -> Hold | Found:
            connections = rival._connections
            assert isinstance(connections, SQLiteConnections)
            begin = connections.lender.begin

            def tell_and_begin() -> sqlite3.Connection:
                asked.set()
                return begin()

            connections.lender.begin = tell_and_begin  # type: ignore[method-assign]  # to know that it waits
            second = rival.transaction()
            try:
                return second.perform(Begin(a_claim()))
            finally:
                second.perform(Undo())

        with ThreadPoolExecutor(1) as thread:
            answer = thread.submit(ask)
            assert asked.wait(60)
            assert first.perform(finish(claim, hold)) is Verdict.DONE
            found = answer.result(60)
        assert isinstance(found, Found)
        assert (found.state, found.token) == (State.COMPLETE, claim.token)

    def test_who_waits_too_long_is_told_for_whom(self, store: SQLiteStore, monkeypatch: pytest.MonkeyPatch) -> None:
        """In one process they wait in turn, for a limited time; the error names the key that has the turn."""
        monkeypatch.setattr(file, "BUSY_TIMEOUT", SHORT)
        slow = store.transaction()
        begun(slow, a_claim("slow"))
        waiting: list[Command[Any]] = [Begin(a_claim("next")), Open()]
        for command in waiting:
            with pytest.raises(StoreUnavailable, match="transaction of this process, that of key 5e0cf7bd1dfa") as told:
                store.transaction().perform(command)
            assert told.value.was_sent is False
        slow.perform(Undo())
        finished(store, "next")

    def test_others_wait_no_longer(
        self, sqlite_url: str, path: Path, store: SQLiteStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Another process's transaction that keeps the file locked is an error in time, and the turn is given on."""
        slow = store.transaction()
        begun(slow, a_claim("slow"))
        slow.perform(Undo())
        with closing(sqlite3.connect(path, isolation_level=None)) as stranger, SQLiteStore(sqlite_url) as other:
            finished(other, "old")
            monkeypatch.setattr(file, "BUSY_TIMEOUT", SHORT)
            other.close()
            finished(other, "older")
            stranger.execute("BEGIN IMMEDIATE")
            with pytest.raises(StoreUnavailable, match="locked by another process"):
                other.transaction().perform(Begin(a_claim("next")))
            stranger.execute("ROLLBACK")
            finished(other, "next")

    def test_guarded_requests_go_on_reading(
        self, sqlite_url: str, store: SQLiteStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """While a handler holds the write lock, guarded requests are told in time, and replays go on."""
        monkeypatch.setattr(file, "BUSY_TIMEOUT", SHORT)
        with SQLiteStore(sqlite_url) as guarded:
            finished(guarded, "old")
            slow = store.transaction()
            begun(slow, a_claim("slow"))
            for _ in range(2):
                with pytest.raises(StoreUnavailable, match="or by a transaction of this one"):
                    guarded.perform(a_claim("new"))
                found = guarded.perform(a_claim("old"))
                assert isinstance(found, Found)
                assert found.answer == ANSWER
            slow.perform(Undo())
            assert isinstance(guarded.perform(a_claim("new")), Hold)

    def test_settling_waits_for_the_end(self, store: SQLiteStore, rival: SQLiteStore) -> None:
        """Who wants to know what became of a commit waits until it can't change any more."""
        transaction, claim = store.transaction(), a_claim()
        hold = begun(transaction, claim)
        rival.open()
        connection = rival._writer.opened
        assert connection is not None
        asked = threading.Event()
        connection.set_trace_callback(lambda sql: asked.set() if sql.startswith("BEGIN") else None)
        with ThreadPoolExecutor(1) as thread:
            settled = thread.submit(rival.perform, Settle(hold))
            assert asked.wait(60)
            assert transaction.perform(finish(claim, hold)) is Verdict.DONE
            record = settled.result(60)
        assert record is not None
        assert (record.token, record.answer) == (claim.token, ANSWER)

    def test_many_threads_take_turns(self, store: SQLiteStore, path: Path) -> None:
        """Many handlers at once all get their turn, and of each key one runs."""

        def serve(number: int) -> Any:
            transaction, claim = store.transaction(), a_claim(f"key-{number % 20}")
            try:
                got = transaction.perform(Begin(claim))
                if isinstance(got, Found):
                    return got.state
                transaction.connection.execute("INSERT INTO rides DEFAULT VALUES")
                return transaction.perform(finish(claim, got))
            finally:
                transaction.perform(Undo())

        with ThreadPoolExecutor(16) as threads:
            got = list(threads.map(serve, range(60)))
        assert got.count(Verdict.DONE) == 20
        assert rides(path) == 20


class TestTrouble:
    def test_a_commit_that_fails_is_unknown(self, store: SQLiteStore, path: Path) -> None:
        """Trouble at the very end leaves open whether it was committed; the next transaction is not touched by it."""
        transaction, claim = store.transaction(), a_claim()
        hold = begun(transaction, claim)
        # The one way to fail a COMMIT without breaking a disk.
        transaction.connection.set_authorizer(
            lambda _, what, *__: sqlite3.SQLITE_DENY if what == "COMMIT" else sqlite3.SQLITE_OK
        )
        with pytest.raises(CommitUnknown) as unknown:
            transaction.perform(finish(claim, hold))
        assert unknown.value.was_sent is True
        assert store.perform(Settle(hold)) is None
        finished(store)

    def test_a_constraint_at_the_end_is_certain(self, store: SQLiteStore, path: Path) -> None:
        """A constraint that is checked on commit undoes everything, and is the driver's own error."""
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("CREATE TABLE cars (id INTEGER PRIMARY KEY)")
            connection.execute("CREATE TABLE trips (car INTEGER REFERENCES cars DEFERRABLE INITIALLY DEFERRED)")
        first = store.transaction()
        begun(first, a_claim("other"))
        first.connection.execute("ROLLBACK")  # foreign keys are turned on outside of transactions only
        first.connection.execute("PRAGMA foreign_keys = ON")
        first.connection.execute("BEGIN IMMEDIATE")
        first.connection.execute("INSERT INTO trips VALUES (7)")
        claim = a_claim("other")
        with pytest.raises(sqlite3.IntegrityError):
            first.perform(finish(claim, Hold("scope", "other", 1, claim.token)))
        assert store.perform(Look("scope", "other")) is None
        finished(store)

    def test_a_refused_row_is_the_drivers_error(self, store: SQLiteStore) -> None:
        """Trouble with the data is told in the driver's own words, and the transaction can be undone."""
        transaction, claim = store.transaction(), a_claim()
        hold = begun(transaction, claim)
        with pytest.raises(sqlite3.IntegrityError):
            transaction.perform(Finish(claim, hold, None, Event.COMPLETE, Answer(42)))
        transaction.perform(Undo())
        finished(store)

    def test_a_fork_in_the_middle(self, store: SQLiteStore, path: Path) -> None:
        """A child that was forked in the middle of a transaction has connections of its own; the parent's goes on."""
        finished(store, "old")
        transaction, claim = store.transaction(), a_claim()
        hold = begun(transaction, claim)
        transaction.connection.execute("INSERT INTO rides DEFAULT VALUES")
        child = os.fork()
        if not child:
            code = 1
            try:
                found = store.transaction().perform(Begin(a_claim("old")))
                code = 0 if isinstance(found, Found) and found.answer == ANSWER else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert transaction.perform(finish(claim, hold)) is Verdict.DONE
        assert rides(path) == 1
        with closing(sqlite3.connect(path)) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]

    def test_a_child_of_an_idle_parent_writes(self, store: SQLiteStore) -> None:
        """A forked child begins and commits by itself, though its parent had connections and had its turn."""
        finished(store, "parent")
        slow = store.transaction()
        slow.perform(Open())
        slow.perform(Undo())
        child = os.fork()
        if not child:
            code = 1
            try:
                finished(store, "child")
                store.close()
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert store.perform(Look("scope", "child")) is not None
        finished(store, "parent again")


class TestJoins:
    def test_they_run_through_sqlalchemy(self, store: SQLiteStore, path: Path) -> None:
        """The statements that join are plain enough for SQLAlchemy's text(): one row each, follow-ups too."""
        store.open()
        joins = SQLiteJoins(Statements(Names()), "tester", is_full=True)
        claim, phase = a_claim(), a_claim("phase")
        held = store.perform(phase)
        assert isinstance(held, Hold)
        engine = sqlalchemy.create_engine(f"sqlite:///{path}")

        def run(connection: sqlalchemy.Connection, joined: Joined[Any]) -> Any:
            rows = connection.execute(sqlalchemy.text(joined.query.text), dict(joined.parameters)).fetchall()
            if rows and joined.also is not None:
                assert (
                    len(connection.execute(sqlalchemy.text(joined.also.query.text), joined.also.parameters).all()) == 1
                )
            return joined.read(rows)

        with engine.begin() as connection:
            hold = run(connection, joins.begin(Begin(claim))).seen
            assert hold == Hold("scope", "key", 1, claim.token)
            assert run(connection, joins.finish(finish(claim, hold))) is Verdict.DONE
            assert run(connection, joins.finish(finish(claim, hold))) is Verdict.FENCED
            assert run(connection, joins.commit(Commit(held, STEPS))) is Verdict.DONE
            assert run(connection, joins.begin(Begin(claim))).seen.answer == ANSWER
        engine.dispose()
        assert [line.event for line in store.perform(ReadTrail("scope", "key"))] == ["completed"]
        assert [line.actor for line in store.perform(ReadTrail("scope", "phase"))] == ["tester"]

    def test_other_connections_can_be_given(self, sqlite_url: str) -> None:
        """Where transactions come from is for the application to say, if it likes."""
        connections = SQLiteConnections(locate(sqlite_url))
        with SQLiteStore(sqlite_url, connections=connections) as store:
            finished(store)
            assert store._connections is connections


async def async_begun(transaction: AsyncTransaction, claim: Claim) -> Hold:
    hold = await transaction.perform(Begin(claim))
    assert isinstance(hold, Hold)
    return hold


async def async_finished(store: AsyncSQLiteStore, key: str) -> None:
    transaction, claim = store.transaction(), a_claim(key)
    assert await transaction.perform(finish(claim, await async_begun(transaction, claim))) is Verdict.DONE


class TestAsync:
    async def test_the_record_and_the_business_commit_together(self, sqlite_url: str, path: Path) -> None:
        """On a loop, too, the handler's connection is a plain one, and its writes are the record's neighbours."""
        async with AsyncSQLiteStore(sqlite_url) as store:
            transaction, claim = store.transaction(), a_claim()
            hold = await async_begun(transaction, claim)
            assert isinstance(transaction.connection, sqlite3.Connection)
            transaction.connection.execute("INSERT INTO rides DEFAULT VALUES")
            assert rides(path) == 0
            assert await transaction.perform(finish(claim, hold)) is Verdict.DONE
            assert rides(path) == 1

    async def test_many_tasks_take_turns(self, sqlite_url: str, path: Path) -> None:
        """Many handlers at once all get their turn, in order, and the loop goes on meanwhile."""
        async with AsyncSQLiteStore(sqlite_url) as store:
            served = []

            async def serve(number: int) -> None:
                transaction, claim = store.transaction(), a_claim(f"key-{number}")
                hold = await async_begun(transaction, claim)
                served.append(number)
                await asyncio.sleep(0)
                assert await transaction.perform(finish(claim, hold)) is Verdict.DONE

            await asyncio.gather(*[serve(number) for number in range(20)])
            assert sorted(served) == list(range(20))

    async def test_a_replay_does_not_wait(self, sqlite_url: str, path: Path) -> None:
        """While a slow handler holds the write lock, answers are given."""
        async with AsyncSQLiteStore(sqlite_url) as store:
            await async_finished(store, "old")
            slow = store.transaction()
            await async_begun(slow, a_claim("slow"))
            found = await store.transaction().perform(Begin(a_claim("old")))
            assert isinstance(found, Found)
            assert found.answer == ANSWER
            await slow.perform(Undo())

    async def test_a_replay_passes_a_claim_that_waits(self, sqlite_url: str, path: Path) -> None:
        """A claim waits for the write lock of somebody's handler, and a guarded replay that comes after it does not."""
        async with AsyncSQLiteStore(sqlite_url) as store:
            await async_finished(store, "old")
            slow = store.transaction()
            await async_begun(slow, a_claim("slow"))
            new = store.perform(a_claim("new"))
            found = await store.perform(a_claim("old"))
            assert isinstance(found, Found)
            assert found.answer == ANSWER
            assert not new.done()
            await slow.perform(Undo())
            assert isinstance(await new, Hold)

    async def test_a_release_follows_its_claim(self, sqlite_url: str, path: Path) -> None:
        """A claim and its release by the token alone, asked for in one breath, leave the key free, whatever else is
        under way.
        """
        async with AsyncSQLiteStore(sqlite_url) as store:
            for number in range(20):
                under_way = store.perform(a_claim(f"other-{number}"))
                while not under_way.done():
                    claim = a_claim()
                    claimed = store.perform(claim)
                    released = store.perform(Release(Hold("scope", "key", 0, claim.token)))
                    assert isinstance(await claimed, Hold)
                    assert await released is Verdict.DONE
                    assert await store.perform(Look("scope", "key")) is None

    async def test_who_waits_too_long_is_told_for_whom(
        self, sqlite_url: str, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The error names the key that has the turn."""
        monkeypatch.setattr(file, "BUSY_TIMEOUT", SHORT)
        async with AsyncSQLiteStore(sqlite_url) as store:
            slow = store.transaction()
            await async_begun(slow, a_claim("slow"))
            with pytest.raises(StoreUnavailable, match="that of key 5e0cf7bd1dfa"):
                await store.transaction().perform(Begin(a_claim("next")))
            await slow.perform(Undo())
            await async_finished(store, "next")

    async def test_cancelled_while_it_waits(self, sqlite_url: str, path: Path) -> None:
        """A request that is cancelled while it waits for its turn, or for the lock, leaves both to the next."""
        async with AsyncSQLiteStore(sqlite_url) as store:
            await async_finished(store, "old")
            slow = store.transaction()
            await async_begun(slow, a_claim("slow"))
            in_turn = asyncio.create_task(store.transaction().perform(Begin(a_claim("next"))))
            while not store._connections._turn._waiters:  # type: ignore[attr-defined]  # noqa: ASYNC110 - a lock tells nobody
                await asyncio.sleep(0.001)
            in_turn.cancel()
            with pytest.raises(asyncio.CancelledError):
                await in_turn
            await slow.perform(Undo())
            with closing(sqlite3.connect(path, isolation_level=None)) as stranger:
                stranger.execute("BEGIN IMMEDIATE")
                for_the_lock = asyncio.create_task(store.transaction().perform(Begin(a_claim("other"))))
                while not store._connections._turn.locked():  # type: ignore[attr-defined]  # noqa: ASYNC110 - as above
                    await asyncio.sleep(0.001)
                for_the_lock.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await for_the_lock
                stranger.execute("ROLLBACK")
            await async_finished(store, "next")

    async def test_cancelled_while_it_commits(self, sqlite_url: str, path: Path) -> None:
        """A commit that is cancelled goes on, and the turn is given on when it is through."""
        async with AsyncSQLiteStore(sqlite_url) as store:
            transaction, claim = store.transaction(), a_claim()
            hold = await async_begun(transaction, claim)
            may_commit = threading.Event()
            lender = store._connections.lender  # type: ignore[attr-defined]
            commit = lender.commit
            lender.commit = lambda connection: may_commit.wait(60) and commit(connection)
            ending = asyncio.create_task(transaction.perform(finish(claim, hold)))
            while transaction._unit is not None:  # noqa: ASYNC110 - it tells nobody
                await asyncio.sleep(0.001)
            ending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await ending
            lender.commit = commit
            may_commit.set()
            await async_finished(store, "next")
            record = await store.perform(Settle(hold))
            assert record is not None
            assert record.answer == ANSWER

    def test_another_loop_starts_afresh(self, sqlite_url: str, path: Path) -> None:
        """A transaction that a dead loop left open does not keep the next loop from its own."""
        store = AsyncSQLiteStore(sqlite_url)

        async def leave_open() -> None:
            await async_begun(store.transaction(), a_claim("left"))

        async def go_on() -> None:
            await async_finished(store, "left")
            await store.close()

        asyncio.run(leave_open())
        asyncio.run(go_on())

    async def test_a_completed_claim_is_told(self, sqlite_url: str, path: Path) -> None:
        """What the ledger stored, a transaction finds."""
        async with AsyncSQLiteStore(sqlite_url) as store:
            hold = await store.perform(a_claim())
            assert isinstance(hold, Hold)
            await store.perform(Complete(hold, Event.COMPLETE, ANSWER))
            found = await store.transaction().perform(Begin(a_claim()))
            assert isinstance(found, Found)
            assert found.answer == ANSWER
