"""SQLite among processes and event loops: at start-up, after a kill, over a fork, from one loop to the next."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

import semel
from semel.core.commands import Again, Claim, Complete, Verdict
from semel.core.message import Answer
from semel.core.record import Found, Hold
from semel.core.state import Event
from semel.errors import StoreUnavailable
from semel.stores.sqlite import AsyncSQLiteStore, SQLiteStore

HOUR = timedelta(hours=1)


def a_claim(key: str = "key") -> Claim:
    return Claim("scope", key, os.urandom(16), b"print", HOUR, HOUR)


def done(store: SQLiteStore, key: str = "key") -> None:
    hold = store.perform(a_claim(key))
    assert isinstance(hold, Hold)
    assert store.perform(Complete(hold, Event.COMPLETE, Answer(201))) is Verdict.DONE


@pytest.fixture
def store(sqlite_url: str) -> Iterator[SQLiteStore]:
    with SQLiteStore(sqlite_url) as store:
        yield store


def has_log(url: str) -> bool:
    """Whether there is a write-ahead log: SQLite removes it when the last connection is closed."""
    return Path(f"{url.removeprefix('sqlite:///')}-wal").exists()


class TestProcesses:
    def test_processes_may_start_at_the_same_time(self, sqlite_url: str) -> None:
        """Four processes that make the file at once all get their tables, and of their claims on one key one wins."""
        children = [program(f"open({sqlite_url!r}).perform(claim())", waits=True) for _ in range(4)]
        for child in children:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
        for child in children:
            assert child.stdin is not None
            child.stdin.write("go\n")
            child.stdin.flush()
        said = [child.communicate(timeout=60)[0].split() for child in children]
        assert sorted(said) == [["Found"], ["Found"], ["Found"], ["Hold"]]

    def test_a_killed_process_leaves_no_lock(self, store: SQLiteStore, sqlite_url: str) -> None:
        """A process killed in the middle of a transaction keeps nobody waiting; what it had committed stays."""
        child = program(
            f"store = open({sqlite_url!r})",
            "store.perform(claim('committed'))",
            f"file = sqlite3.connect({sqlite_url.removeprefix('sqlite:///')!r}, isolation_level=None)",
            "file.execute('BEGIN IMMEDIATE')",
            "file.execute('DELETE FROM semel_keys')",
            "os.kill(os.getpid(), 9)",
        )
        child.communicate(timeout=60)
        assert child.returncode == -signal.SIGKILL
        assert isinstance(store.perform(a_claim("committed")), Found)
        assert isinstance(store.perform(a_claim("free")), Hold)

    @pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
    def test_a_forked_child_opens_the_file_for_itself(self, store: SQLiteStore, sqlite_url: str) -> None:
        """A store in use before a fork serves both sides after it.

        Here the parent then closes the file. Had its connection lived through the fork, SQLite would have deleted the
        log that the child goes on writing to.
        """
        done(store, "before")
        said, say = os.pipe()
        hear, tell = os.pipe()
        child = os.fork()
        if not child:
            with ending():
                done(store, "child, parent open")
                os.write(say, b"!")
                os.read(hear, 1)
                done(store, "child, parent closed")
        os.read(said, 1)
        assert isinstance(store.perform(a_claim("child, parent open")), Found)
        store.close()
        os.write(tell, b"!")
        assert os.waitpid(child, 0)[1] == 0
        for descriptor in (said, say, hear, tell):
            os.close(descriptor)
        assert isinstance(store.perform(a_claim("child, parent closed")), Found)

    def test_a_connection_of_another_process_is_not_used(self, store: SQLiteStore) -> None:
        """Where a fork went unnoticed the store refuses to work, and neither uses nor closes what it inherited."""
        done(store)
        writer, connection = store._writer, store._writer.opened
        for each in (writer, *store._readers):
            each.opened_by = 1
        with pytest.raises(StoreUnavailable, match="Close the store before the fork"):
            store.perform(a_claim())
        store.close()
        assert writer.opened is connection
        writer.opened_by = os.getpid()


class TestLoops:
    def test_one_store_serves_one_loop_after_another(self, sqlite_url: str) -> None:
        """A store that was left open by one event loop works in the next one, as tests use it."""
        store = AsyncSQLiteStore(sqlite_url)

        async def claim() -> Hold | Found | Again:
            return await store.perform(a_claim())

        assert isinstance(asyncio.run(claim()), Hold)
        assert isinstance(asyncio.run(claim()), Found)
        asyncio.run(store.close())

    async def test_closing_waits_for_what_was_asked(self, sqlite_url: str) -> None:
        """What was asked before `close` is carried out, and the store opens again when it is used again."""
        store = AsyncSQLiteStore(sqlite_url)
        asked = [store.perform(a_claim(f"key-{number}")) for number in range(300)]
        await store.close()
        assert all(isinstance(each.result(), Hold) for each in asked)
        found = await store.perform(a_claim("key-0"))
        assert isinstance(found, Found)
        assert has_log(sqlite_url)
        await store.close()
        assert not has_log(sqlite_url)

    async def test_trouble_reaches_every_caller(self, tmp_path: Path) -> None:
        """A file that can't be opened is a 503 for each request, not an error in a thread nobody looks at."""
        store = AsyncSQLiteStore(f"sqlite:///{tmp_path}/absent/semel.db")
        asked = [store.perform(a_claim()) for _ in range(3)]
        got = await asyncio.gather(*asked, return_exceptions=True)
        assert [type(each) for each in got] == [StoreUnavailable] * 3
        await store.close()


def program(*lines: str, waits: bool = False) -> subprocess.Popen[str]:
    """Another process that says of what kind the last line's value is."""
    *before, last = lines
    text = [
        "import os, sqlite3, sys",
        "from datetime import timedelta",
        "from semel.core.commands import Claim",
        "from semel.stores import store as open",
        "hour = timedelta(hours=1)",
        "def claim(key='key'): return Claim('scope', key, os.urandom(16), b'', hour, hour)",
        *(["print('ready', flush=True)", "sys.stdin.readline()"] if waits else []),
        *before,
        f"print(type({last}).__name__, flush=True)",
    ]
    source = str(Path(semel.__file__).parents[1])
    return subprocess.Popen(
        [sys.executable, "-c", "\n".join(text)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": source},
    )


class ending:  # noqa: N801 - reads as a word where it is used
    """The end of a forked child: no test runner goes on in it."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        os._exit(0 if error is None else 1)
