"""Instant take-over on PostgreSQL: a dead process is known to be dead at once, a live one is left alone, and one whose
lock was lost takes all that it holds for lost.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

from semel.core.commands import Again, Claim, Complete, FindStuck, Look, Renew, TakeOver, Verdict
from semel.core.message import Answer, Head, Request
from semel.core.record import Found, Hold, Record
from semel.core.state import Event
from semel.errors import ConfigurationError
from semel.stores import async_store, store
from semel.stores.postgres import liveness, network
from semel.stores.postgres.address import Address
from semel.stores.postgres.async_store import AsyncPostgresStore
from semel.stores.postgres.liveness import Liveness
from semel.stores.postgres.signals import owner_lock
from semel.stores.postgres.statements import Statements
from semel.stores.postgres.store import PostgresStore
from semel.stores.statement import Names
from semel.work import Sweeper
from tests.kit import servers
from tests.stores.colours import COLOURS, SECONDS, Process, process, wait_until

LEASE, RETENTION = timedelta(seconds=60), timedelta(hours=1)
#: What is left of a lease of which hardly anything is over, on a machine however busy.
MOST_OF_IT = timedelta(seconds=20)
ANSWER = Answer(201, (), b"{}")
REQUEST = Request(Head("POST", "/jobs", b"", ()), b"{}", "alice")
WORKER = Path(__file__).with_name("worker.py")


def claim(key: str = "k", lease: timedelta = LEASE, **more: Any) -> Claim:
    return Claim("alice", key, os.urandom(16), b"fingerprint", lease, RETENTION, **more)


@pytest.fixture
def postgres_url(migrated_postgres_url: str) -> str:
    """The URL of a database with Semel's tables in it."""
    return migrated_postgres_url


@pytest.fixture
def url(postgres_url: str) -> str:
    """A table, and instant take-over."""
    made = store(postgres_url)
    made.migrate()
    made.close()
    return f"{postgres_url}?takeover=instant"


@pytest.fixture(params=COLOURS)
def colour(request: pytest.FixtureRequest) -> str:
    colour: str = request.param
    return colour


@pytest.fixture
def living(colour: str, url: str) -> Iterator[Process]:
    """A process of either colour."""
    with process(colour, url) as made:
        yield made


@contextmanager
def worker(
    url: str, colour: str = "sync", key: str = "k", lease: timedelta = LEASE, *more: str
) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that has claimed *key* and works on it; and the child that it forked."""
    command = [sys.executable, str(WORKER), url, colour, key, str(lease.total_seconds()), *more]
    paths = os.pathsep.join(path for path in sys.path if path)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": paths}) as child:
        try:
            assert child.stdout is not None
            word, forked = child.stdout.readline().split()
            assert word == "claimed"
            yield child, int(forked)
        finally:
            child.kill()


def found_over(asking: Process) -> bool:
    found = asking.perform(claim())
    assert isinstance(found, Found)
    return found.lease_is_over


def record(asking: Process | PostgresStore, key: str = "k") -> Record:
    got = asking.perform(Look("alice", key))
    assert got is not None
    return got


def taken_over(asking: Process | PostgresStore, seen: Record) -> Hold | Again:
    mine = claim(seen.key)
    return asking.perform(TakeOver(mine, Hold(seen.scope, seen.key, seen.attempt, seen.token)))


def query(url: str, question: str, *values: Any) -> list[Any]:
    with psycopg.connect(url.partition("?")[0], autocommit=True) as connection:
        cursor = connection.execute(question.encode(), values or None)
        return [row[0] for row in cursor.fetchall()] if cursor.description else []


def owners(url: str, key: str = "k") -> list[int | None]:
    return query(url, "SELECT owner FROM semel_keys WHERE key = %s", key)


def locks(url: str) -> dict[int, int]:
    """The numbers of the locks that are held by processes that live, and by which of the server's."""
    with psycopg.connect(url.partition("?")[0], autocommit=True) as connection:
        rows = connection.execute(
            "SELECT (classid::bigint << 32) | objid::bigint, pid FROM pg_locks WHERE locktype = 'advisory' "
            "AND mode = 'ExclusiveLock' AND granted "
            "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
        )
        return dict(rows.fetchall())


def cut(url: str, number: int | None = None) -> None:
    """Cut the connections on which locks are held, or one of them."""
    for each, pid in locks(url).items():
        if number in {None, each}:
            query(url, "SELECT pg_terminate_backend(%s)", pid)


class TestDeath:
    def test_killed_worker_is_taken_over_at_once(self, living: Process, colour: str, url: str) -> None:
        """After kill -9 of a worker a retry takes over though nearly all of its lease is left, and then holds it."""
        with worker(url, colour) as (doomed, _):
            assert not found_over(living)
            doomed.kill()
            wait_until(lambda: found_over(living))
        seen = record(living)
        assert seen.lease_left is not None
        assert seen.lease_left > MOST_OF_IT
        hold = taken_over(living, seen)
        assert isinstance(hold, Hold)
        assert hold.attempt == 2
        assert owners(url) == list(locks(url))
        assert living.perform(Complete(hold, Event.COMPLETE, ANSWER)) is Verdict.DONE
        assert owners(url) == [None]

    def test_stopped_worker_lives(self, living: Process, colour: str, url: str) -> None:
        """A worker that is stopped, or hangs, is alive as far as anybody can tell: its lease decides, and no sooner."""
        with worker(url, colour, lease=timedelta(seconds=2)) as (frozen, _):
            os.kill(frozen.pid, signal.SIGSTOP)
            mine: list[Hold] = []

            def is_mine() -> bool:
                # What it had sent before it was stopped may still prolong its lease.
                seen = record(living)
                got = taken_over(living, seen)
                mine.extend([got] if isinstance(got, Hold) else [])
                return bool(mine) and seen.lease_expires_at is not None and _taken_at(url) >= seen.lease_expires_at

            wait_until(is_mine)

    def test_sweeper_and_completer_see_the_dead(self, url: str) -> None:
        """What a dead process has left is found by those who clean up while its lease is still running."""
        with PostgresStore(url) as upkeep:
            with worker(url) as (doomed, _):
                assert upkeep.perform(FindStuck(10)) == ()
                doomed.kill()
                wait_until(lambda: upkeep.perform(FindStuck(10)))
            assert Sweeper(upkeep).run_once().freed == 1
            swept = record(upkeep)
            assert swept.lease_left is not None
            assert swept.lease_left <= timedelta(0)
            assert isinstance(taken_over(upkeep, swept), Hold)

    def test_stored_request_of_the_dead_is_found(self, url: str) -> None:
        """An operation whose request was kept is the completer's as soon as its process is dead."""
        with PostgresStore(url) as upkeep:
            with process("sync", url) as doomed:
                assert isinstance(doomed.perform(claim(request=REQUEST)), Hold)
                assert upkeep.perform(FindStuck(10, with_request=True)) == ()
            wait_until(lambda: upkeep.perform(FindStuck(10, with_request=True)))
            (stuck,) = upkeep.perform(FindStuck(10, with_request=True))
            assert stuck.has_request
            got = upkeep.perform(TakeOver(claim(), stuck.hold, is_abandoned=True))
            assert isinstance(got, Hold)
            assert got.attempt == 2

    def test_every_retry_that_comes_at_once_finds_out_and_one_wins(self, url: str) -> None:
        """Of several processes that find the same worker dead one takes over, and the others find it at work."""
        with ExitStack() as stack:
            rivals = [stack.enter_context(process("sync", url)) for _ in range(4)]
            with worker(url) as (doomed, _):
                doomed.kill()
                wait_until(lambda: all(found_over(rival) for rival in rivals))
            seen = record(rivals[0])
            got = [taken_over(rival, seen) for rival in rivals]
            assert sum(isinstance(each, Hold) for each in got) == 1
            assert not any(found_over(rival) for rival in rivals)


class TestLoss:
    def test_cut_lock_is_the_loss_of_all_that_is_held(self, living: Process, url: str) -> None:
        """When the lock's connection is cut, whoever works under it is told, taken over at once, and fenced."""
        hold = living.perform(claim())
        assert isinstance(hold, Hold)
        told = threading.Event()
        living.keep(hold, LEASE, told.set)
        (before,) = locks(url)
        with process("sync", url) as heir:
            heir.perform(claim("warm"))
            assert not found_over(heir)
            cut(url, before)
            assert told.wait(SECONDS)
            wait_until(lambda: found_over(heir))
            assert isinstance(taken_over(heir, record(heir)), Hold)
        assert living.perform(Complete(hold, Event.COMPLETE, ANSWER)) is Verdict.FENCED

    def test_next_claims_bear_another_number(self, living: Process, url: str) -> None:
        """A process that has lost its lock goes on to claim, by leases at first, and under another number soon."""
        assert isinstance(living.perform(claim("before")), Hold)
        (before,) = owners(url, "before")
        cut(url)
        keys: list[str] = []

        def is_owned() -> bool:
            keys.append(f"after-{len(keys)}")
            assert isinstance(living.perform(claim(keys[-1])), Hold)
            return owners(url, keys[-1]) not in ([None], [before])

        wait_until(is_owned)
        assert owners(url, keys[-1]) == list(locks(url))

    def test_hold_that_nobody_could_tell_is_told_by_its_renewal(self, living: Process, url: str) -> None:
        """A hold that was on its way to its leases when the lock was lost is lost to the next renewal, no later."""
        hold = living.perform(claim())
        assert isinstance(hold, Hold)
        cut(url)
        wait_until(lambda: living.store._liveness.owner() is None or living.store._liveness.owner() not in owners(url))
        wait_until(lambda: living.store._liveness.owner() is not None)
        told = threading.Event()
        living.keep(hold, timedelta(milliseconds=30), told.set)
        assert told.wait(SECONDS)

    def test_living_holds_are_renewed(self, living: Process, url: str) -> None:
        """As long as the lock is held, holds under it are renewed, and none is lost."""
        hold = living.perform(claim())
        assert isinstance(hold, Hold)
        assert owners(url) == list(locks(url))
        assert living.perform(Renew(((hold, LEASE * 10),))) == frozenset()
        left = record(living).lease_left
        assert left is not None
        assert left > LEASE

    def test_restart_of_the_server_frees_every_lock(self, colour: str) -> None:
        """A restart of PostgreSQL is the loss of every lock: all who work are told, and new claims get new ones."""
        with servers.postgres(settings={"fsync": "off"}) as server:
            url = f"{server.url}?takeover=instant"
            store(server.url).migrate()
            with process(colour, url) as living:
                hold = living.perform(claim())
                assert isinstance(hold, Hold)
                told = threading.Event()
                living.keep(hold, LEASE, told.set)
                server.stop()
                assert told.wait(SECONDS)
                server.start()
                wait_until(lambda: locks(server.url))
                wait_until(lambda: found_over(living))
                assert isinstance(taken_over(living, record(living)), Hold)

    def test_close_lets_go(self, living: Process, url: str) -> None:
        """A store that is closed holds no lock and has no thread; used again, it holds another one."""
        assert isinstance(living.perform(claim()), Hold)
        (before,) = locks(url)
        living.close_store()
        wait_until(lambda: not locks(url))
        assert not [each for each in threading.enumerate() if each.name == Liveness.name]
        assert isinstance(living.perform(claim("again")), Hold)
        assert owners(url, "again") == list(locks(url)) != [before]


class TestOrder:
    def test_lock_is_held_before_the_first_claim(self, living: Process, url: str) -> None:
        """A process that only looks holds no lock; its first claim bears the number of one that is held."""
        assert living.perform(Look("alice", "k")) is None
        assert not locks(url)
        assert isinstance(living.perform(claim()), Hold)
        assert owners(url) == list(locks(url))

    def test_crowd_of_first_claims_bears_one_number(self, url: str) -> None:
        """Threads that claim all at once in a new process wait for one lock, and bear its number."""
        with PostgresStore(url) as postgres:
            start = threading.Barrier(8)

            def first(number: int) -> None:
                start.wait()
                postgres.perform(claim(f"k{number}"))

            threads = [threading.Thread(target=first, args=(number,)) for number in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(SECONDS)
            assert query(url, "SELECT DISTINCT owner FROM semel_keys") == list(locks(url))

    @pytest.mark.parametrize("how", ["claim", "take over"])
    def test_number_of_a_lock_that_is_not_held_is_not_written(self, url: str, how: str) -> None:
        """A claim that is sent when its lock is lost, or on another server than the lock's, bears no number."""
        number = owner_lock()
        statements = Statements(Names(), owner=lambda: number)
        hold = Hold("alice", "k", 1, os.urandom(16))

        def write(connection: psycopg.Connection[Any]) -> int | None:
            seen = Claim("alice", "k", hold.token, b"", timedelta(0), RETENTION)
            if how == "take over":
                _run(connection, Statements(Names()).claim([seen]))
            written = statements.claim([claim()]) if how == "claim" else statements.take_over(TakeOver(claim(), hold))
            _run(connection, written)
            return _run(connection, "DELETE FROM semel_keys RETURNING owner")  # type: ignore[no-any-return]  # bigint

        plain = url.partition("?")[0]
        with psycopg.connect(plain, autocommit=True, cursor_factory=psycopg.RawCursor) as connection:
            assert write(connection) is None
            with psycopg.connect(plain) as holder:
                holder.execute("SELECT pg_advisory_lock(%s)", [number])
                assert write(connection) == number

    def test_loops_that_come_and_go_share_the_lock(self, url: str) -> None:
        """A store that is used on one event loop after another keeps its lock: the process has lived all along."""
        made = AsyncPostgresStore(url)

        async def claimed(key: str) -> None:
            hold = await made.perform(claim(key))
            assert isinstance(hold, Hold)
            await made._close()  # All but the lock, as the end of a loop does, only tidily.

        asyncio.run(claimed("a"))
        asyncio.run(claimed("b"))
        assert owners(url, "a") == owners(url, "b") == list(locks(url))
        asyncio.run(made.close())
        wait_until(lambda: not locks(url))

    def test_machine_that_dies_is_noticed_by_the_server(self, url: str) -> None:
        """The lock's session asks the server to look after it more often than a server usually does."""
        said: dict[str, str] = {}

        class Asking(Liveness):
            def opened(self, connection: psycopg.Connection[Any]) -> None:
                super().opened(connection)
                said.update(connection.execute("SELECT name, setting FROM pg_settings WHERE name LIKE 'tcp_keep%'"))

        asking = Asking(Address.of(url))
        asking.settle()
        asking.close()
        assert said == {
            "tcp_keepalives_idle": str(network.KEEPALIVE_IDLE_SECONDS),
            "tcp_keepalives_interval": str(network.KEEPALIVE_INTERVAL_SECONDS),
            "tcp_keepalives_count": str(network.KEEPALIVE_COUNT),
        }

    def test_number_that_somebody_has_is_drawn_again(self, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Two processes that draw the same number do not share it: the second draws another."""
        same, other = owner_lock(), owner_lock()
        drawn = iter([same, same, other])
        monkeypatch.setattr(liveness, "owner_lock", lambda: next(drawn))
        with PostgresStore(url) as first, PostgresStore(url) as second:
            first.perform(claim("a"))
            second.perform(claim("b"))
            assert (owners(url, "a"), owners(url, "b")) == ([same], [other])


class TestOff:
    def test_nobody_is_watched_unless_it_is_asked_for(self, colour: str, url: str) -> None:
        """Without ?takeover=instant there is no lock, and the lease of a dead worker is waited for."""
        with process(colour, url.partition("?")[0]) as plain:
            with worker(url) as (doomed, _):
                (held,) = locks(url)
                assert owners(url) == [held]
                doomed.kill()
                wait_until(lambda: not locks(url))
            assert not found_over(plain)
            assert isinstance(taken_over(plain, record(plain)), Again)
            assert isinstance(plain.perform(claim("mine")), Hold)
            assert owners(url, "mine") == [None]

    def test_both_kinds_of_processes_are_right_together(self, colour: str, url: str) -> None:
        """A worker without a lock is left to its lease by those who have one; what they take over bears their number,
        and what it takes over from them bears none.
        """
        plain_url = url.partition("?")[0]
        short = timedelta(seconds=1)
        with process(colour, url) as instant, process(colour, plain_url) as plain:
            with worker(plain_url, lease=short) as (doomed, _):
                doomed.kill()
                doomed.wait()
            assert owners(url) == [None]
            wait_until(lambda: found_over(instant))
            seen = record(instant)
            assert seen.lease_left is not None
            assert seen.lease_left <= timedelta(0)
            assert isinstance(taken_over(instant, seen), Hold)
            assert owners(url) == list(locks(url))
            with worker(url, key="other", lease=short) as (doomed, _):
                doomed.kill()
            mine: list[Hold] = []

            def is_mine() -> bool:
                got = taken_over(plain, record(plain, "other"))
                mine.extend([got] if isinstance(got, Hold) else [])
                return bool(mine)

            wait_until(is_mine)
            assert owners(url, "other") == [None]

    def test_pooler_turns_it_off(
        self, colour: str, url: str, pgbouncer_url: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Through PgBouncer no lock is held and nobody's is tested: leases decide, and the log says so, once."""
        with process(colour, f"{pgbouncer_url}?takeover=instant") as through:
            holds = [through.perform(claim(key)) for key in ("k", "another")]
            assert all(isinstance(hold, Hold) for hold in holds)
            assert owners(url) == [None]
            assert not locks(url)
            with worker(url, key="dead") as (doomed, _):
                doomed.kill()
                wait_until(lambda: not locks(url))
            found = through.perform(claim("dead"))
            assert isinstance(found, Found)
            assert not found.lease_is_over
        said = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
        assert len(said) == 1
        assert "pooler" in said[0]

    def test_without_a_connection_for_the_lock_leases_decide(self, colour: str, url: str) -> None:
        """Where the lock's connection can't be had, claims are made all the same, under leases, and it is said once."""
        with _unlockable(url), process(colour, url) as living:
            assert isinstance(living.perform(claim()), Hold)
            assert owners(url) == [None]

    @pytest.mark.parametrize("open_store", [store, async_store])
    def test_wrong_word_is_refused(self, open_store: Callable[[str], object]) -> None:
        """A kind of take-over that is not known is an error that names those that are."""
        with pytest.raises(ConfigurationError, match="lease and instant"):
            open_store("postgresql://localhost/db?takeover=soon")


class TestForks:
    def test_child_has_a_lock_of_its_own(self, url: str) -> None:
        """A forked child claims under a number of its own; when it dies its parent takes over at once, and lives on."""
        with process("sync", url) as parent:
            assert isinstance(parent.perform(claim("parent")), Hold)
            child = _fork_that_claims(parent)
            wait_until(lambda: len(locks(url)) == 2)
            wait_until(lambda: owners(url))
            assert owners(url) != owners(url, "parent")
            assert not found_over(parent)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            wait_until(lambda: found_over(parent))
            assert owners(url, "parent") == list(locks(url))

    def test_child_does_not_keep_its_parents_lock(self, url: str) -> None:
        """A worker that dies is dead, though a process that it had forked before lives on with all its files open."""
        with process("sync", url) as heir, worker(url, "sync", "k", LEASE, "fork") as (doomed, forked):
            try:
                doomed.kill()
                doomed.wait()
                os.kill(forked, 0)  # It lives.
                wait_until(lambda: found_over(heir))
            finally:
                os.kill(forked, signal.SIGKILL)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")  # That is the point of it.
def _fork_that_claims(parent: Process) -> int:
    child = os.fork()
    if child == 0:
        try:
            parent.perform(claim())
            threading.Event().wait()
        finally:
            os._exit(1)
    return child


def _taken_at(url: str) -> datetime:
    (at,) = query(url, "SELECT at FROM semel_audit WHERE event = 'taken over'")
    assert isinstance(at, datetime)
    return at


@contextmanager
def _unlockable(url: str) -> Iterator[None]:
    """Have the server refuse sessions that bear the name by which ours ask for a lock."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("semel.stores.postgres.direct.SETTLE", "SELECT no_such_function()")
        yield


def _run(connection: psycopg.Connection[Any], said: Any) -> Any:
    if isinstance(said, str):
        return connection.execute(said.encode()).fetchall()[0][0]
    return said.read(connection.execute(said.sql.encode(), said.parameters, binary=True).fetchall())
