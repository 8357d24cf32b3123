"""Hints on PostgreSQL: who waits hears at once that an operation has ended, in any process; nobody depends on it."""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from semel.core.commands import Claim, Complete, Release, TakeOver, Verdict
from semel.core.hint import hint_of
from semel.core.message import Answer, Head, Request
from semel.core.record import Found, Hold
from semel.core.state import Event
from semel.stores import async_store
from semel.stores.postgres.listening import Listener
from semel.stores.postgres.store import PostgresStore
from tests.stores.colours import COLOURS, SECONDS, AsyncProcess, Process, process, wait_until

LEASE, RETENTION = timedelta(seconds=60), timedelta(hours=1)
ANSWER = Answer(201, (), b"{}")
REQUEST = Request(Head("POST", "/jobs", b"", ()), b"{}", "alice")

Heard = queue.SimpleQueue[str]


def claim(key: str, **more: Any) -> Claim:
    return Claim("alice", key, os.urandom(16), b"fingerprint", LEASE, RETENTION, **more)


class Speaker:
    """Another process on the same table."""

    def __init__(self, url: str) -> None:
        self.store = PostgresStore(url)
        self.store.migrate()

    def claim(self, key: str, **more: Any) -> Hold:
        hold = self.store.perform(claim(key, **more))
        assert isinstance(hold, Hold)
        return hold

    def finish(self, key: str, *, wakes: bool = True) -> str:
        """Begin and end an operation; return its name."""
        assert self.store.perform(Complete(self.claim(key), Event.COMPLETE, ANSWER, wakes)) is Verdict.DONE
        return hint_of("alice", key)


@pytest.fixture
def postgres_url(migrated_postgres_url: str) -> str:
    """The URL of a database with Semel's tables in it."""
    return migrated_postgres_url


@pytest.fixture
def speaker(postgres_url: str) -> Iterator[Speaker]:
    made = Speaker(postgres_url)
    yield made
    made.store.close()


@pytest.fixture(params=COLOURS)
def listening(request: pytest.FixtureRequest, speaker: Speaker, postgres_url: str) -> Iterator[tuple[Process, Heard]]:
    """A process of either colour that listens."""
    heard: Heard = queue.SimpleQueue()
    with process(request.param, postgres_url) as made:
        made.listen(heard.put)
        wait_until(lambda: listeners(postgres_url))
        yield made, heard


def listeners(url: str) -> list[int]:
    """The server's processes whose last words were LISTEN."""
    with psycopg.connect(url, autocommit=True) as connection:
        found = connection.execute(
            "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND query ILIKE 'listen %' "
            "AND state = 'idle' AND application_name = 'semel'"
        )
        return [pid for (pid,) in found]


def test_end_is_heard(listening: tuple[Process, Heard], speaker: Speaker) -> None:
    """Of an operation that ends and may be waited for, every process hears the name, and of others nothing."""
    _, heard = listening
    speaker.finish("silent", wakes=False)
    name = speaker.finish("told")

    assert heard.get(timeout=SECONDS) == name


def test_freed_key_is_heard(listening: tuple[Process, Heard], speaker: Speaker) -> None:
    """Of a key that is freed those who wait hear, too: the next of them may have it."""
    _, heard = listening
    assert speaker.store.perform(Release(speaker.claim("k"), wakes=True)) is Verdict.DONE

    assert heard.get(timeout=SECONDS) == hint_of("alice", "k")


def test_accepted_operation_is_heard(listening: tuple[Process, Heard], speaker: Speaker) -> None:
    """Of an operation that was accepted workers hear, in one word that names none."""
    _, heard = listening
    speaker.claim("job", request=REQUEST, is_accepted=True)

    assert heard.get(timeout=SECONDS) == "accepted"


def test_all_who_want_to_hear_are_told_once(
    listening: tuple[Process, Heard], speaker: Speaker, postgres_url: str
) -> None:
    """A waiting room and a worker share one connection; whoever asks twice is told once."""
    listener, heard = listening
    other: Heard = queue.SimpleQueue()
    for _ in range(2):
        listener.listen(other.put)
    names = [speaker.finish(key) for key in "ab"]

    assert [each.get(timeout=SECONDS) for each in (heard, heard, other, other)] == names * 2
    assert other.empty()
    assert len(listeners(postgres_url)) == 1


def test_lost_connection_is_opened_again(listening: tuple[Process, Heard], speaker: Speaker, postgres_url: str) -> None:
    """When the connection is cut, another is opened, and what is said from then on is heard."""
    _, heard = listening
    (before,) = listeners(postgres_url)
    with psycopg.connect(postgres_url, autocommit=True) as operator:
        operator.execute("SELECT pg_terminate_backend(%s)", [before])
    wait_until(lambda: listeners(postgres_url) not in ([], [before]))
    name = speaker.finish("k")

    assert heard.get(timeout=SECONDS) == name


@pytest.mark.parametrize("colour", COLOURS)
def test_quiet_connection_is_looked_after(
    colour: str, speaker: Speaker, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a connection that is quiet for long something is said now and then, and what comes after is heard."""
    for module in ("direct", "async_listening"):
        monkeypatch.setattr(f"semel.stores.postgres.{module}.HEARTBEAT_SECONDS", 0.02)
    heard: Heard = queue.SimpleQueue()
    with process(colour, postgres_url) as made, psycopg.connect(postgres_url, autocommit=True) as watcher:
        made.listen(heard.put)
        beats = (
            "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() "
            "AND application_name = 'semel' AND query = 'SELECT 1')"
        )
        wait_until(lambda: watcher.execute(beats).fetchall()[0][0])
        name = speaker.finish("k")
        assert heard.get(timeout=SECONDS) == name


def _threads() -> int:
    return sum(thread.name == Listener.name for thread in threading.enumerate())


def test_close_ends_it(listening: tuple[Process, Heard], speaker: Speaker, postgres_url: str) -> None:
    """A store that is closed listens no more, and has no thread; asked again, it listens again."""
    listener, heard = listening
    # Other tests may have left theirs, or be about to. On a loop there is none.
    others = _threads() - (0 if isinstance(listener, AsyncProcess) else 1)
    listener.close_store()
    wait_until(lambda: not listeners(postgres_url))
    wait_until(lambda: _threads() <= others)
    speaker.finish("unheard")
    listener.listen(heard.put)
    wait_until(lambda: listeners(postgres_url))
    name = speaker.finish("k")

    assert heard.get(timeout=SECONDS) == name


@pytest.mark.parametrize("colour", COLOURS)
def test_nothing_is_asked_of_a_pooler(
    colour: str, speaker: Speaker, postgres_url: str, pgbouncer_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Behind PgBouncer there is no LISTEN at all: it would be said on a connection that is lent to the next client."""
    caplog.set_level(logging.DEBUG, "semel")
    heard: Heard = queue.SimpleQueue()
    with process(colour, pgbouncer_url) as made:
        made.listen(heard.put)
        made.listen(heard.put)
        wait_until(lambda: "pooler" in caplog.text)
        speaker.finish("k")
        assert isinstance(made.perform(claim("k")), Found)
        assert not listeners(postgres_url)
    assert caplog.text.count("pooler") == 1
    assert heard.empty()


def test_forked_child_listens_for_itself(speaker: Speaker, postgres_url: str) -> None:
    """A forked child hears nothing through its parent, and both hear when the child listens, too."""
    heard: Heard = queue.SimpleQueue()
    parent = PostgresStore(postgres_url)
    parent.listen(heard.put)
    wait_until(lambda: listeners(postgres_url))
    child = _fork_that_listens(parent)
    try:
        wait_until(lambda: len(listeners(postgres_url)) == 2)
        name = speaker.finish("k")
        assert heard.get(timeout=SECONDS) == name
    finally:
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    # The child's end has not ended the parent's connection.
    name = speaker.finish("again")
    assert heard.get(timeout=SECONDS) == name
    parent.close()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")  # That is the point of it.
def _fork_that_listens(parent: PostgresStore) -> int:
    child = os.fork()
    if child == 0:
        try:
            mine: Heard = queue.SimpleQueue()
            parent.listen(mine.put)
            os._exit(0 if mine.get(timeout=SECONDS) == hint_of("alice", "k") else 1)
        finally:
            os._exit(2)
    return child


def test_each_loop_listens_for_itself(speaker: Speaker, postgres_url: str) -> None:
    """A store that is used on one loop after another hears on each, without being closed in between."""
    made = async_store(postgres_url)

    async def hear(key: str) -> str:
        heard: asyncio.Queue[str] = asyncio.Queue()
        made.listen(heard.put_nowait)
        await asyncio.to_thread(wait_until, lambda: listeners(postgres_url))
        speaker.finish(key)
        async with asyncio.timeout(SECONDS):
            return await heard.get()

    assert asyncio.run(hear("a")) == hint_of("alice", "a")
    wait_until(lambda: not listeners(postgres_url))

    async def hear_and_close() -> str:
        name = await hear("b")
        await made.close()
        return name

    assert asyncio.run(hear_and_close()) == hint_of("alice", "b")


def test_process_is_not_kept_alive(speaker: Speaker, postgres_url: str) -> None:
    """A program that listens ends when its work is done, whether or not it has closed its store."""
    program = "import sys, semel.stores as s; s.store(sys.argv[1]).listen(print); print('done')"
    command = [sys.executable, "-W", "error", "-c", program, postgres_url]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=SECONDS)

    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "done\n", "")


@pytest.mark.parametrize("colour", COLOURS)
def test_server_that_is_not_there_troubles_nobody(colour: str, caplog: pytest.LogCaptureFixture) -> None:
    """Where no server is, listening is tried again and again, and nobody is told but the debug log."""
    caplog.set_level(logging.DEBUG, "semel")
    with process(colour, "postgresql://semel:secret@127.0.0.1:1/db") as made:
        made.listen(print)
        wait_until(lambda: caplog.text.count("can't be heard") >= 2)
    assert "secret" not in caplog.text


def test_take_over_by_a_pending_claim_is_heard(listening: tuple[Process, Heard], speaker: Speaker) -> None:
    """A key that is past retention and is accepted anew is heard of, as a new one is."""
    _, heard = listening
    old = Claim("alice", "job", os.urandom(16), b"fingerprint", timedelta(0), timedelta(0))
    hold = speaker.store.perform(old)
    assert isinstance(hold, Hold)
    taken = speaker.store.perform(TakeOver(claim("job", request=REQUEST, is_accepted=True), hold))
    assert isinstance(taken, Hold)

    assert heard.get(timeout=SECONDS) == "accepted"
