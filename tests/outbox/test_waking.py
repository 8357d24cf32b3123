"""What wakes a relay. That of a file: anything that is committed to it, seen from one thread."""

import asyncio
import os
import sqlite3
import threading
from collections.abc import Collection, Iterator
from contextlib import closing
from typing import Any

import psycopg
import pytest
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from semel import stores
from semel.outbox import Outbox
from semel.stores.transaction import at_once
from semel.work.waking import SQLiteWaker, waker_of
from tests.kit import servers
from tests.kit.servers.base import until
from tests.outbox.conftest import Broker, relay_of, rows

HANG_SECONDS = 60
NOTE = "CREATE TABLE IF NOT EXISTS notes (number INTEGER)"


def watching(others: Collection[threading.Thread] = ()) -> list[threading.Thread]:
    """Those that watch, but for *others*: a thread of a test before may still be on its way out."""
    return [thread for thread in threading.enumerate() if thread.name == "semel-data-version" and thread not in others]


@pytest.fixture
def rung() -> threading.Event:
    return threading.Event()


@pytest.fixture
def waker(sqlite_url: str, rung: threading.Event) -> Iterator[Any]:
    with closing(stores.store(sqlite_url)) as store:
        made: Any = waker_of(store, "events", rung.set)
        yield made
        at_once(made.close())


def test_one_thread(waker: SQLiteWaker) -> None:
    """However often a relay falls asleep, one thread watches for it; it ends with the relay, and may begin again."""
    others = watching()
    for _ in range(2):
        for _ in range(20):
            assert at_once(waker.fall_asleep())
            assert len(watching(others)) == 1
            at_once(waker.wake_up())
        (thread,) = watching(others)
        at_once(waker.close())
        at_once(waker.close())
        thread.join(HANG_SECONDS)
        assert watching(others) == []


def test_woken(waker: SQLiteWaker, rung: threading.Event, sqlite_url: str) -> None:
    """What another connection commits while the relay sleeps wakes it, each time; what came before does not."""
    for number in range(3):
        rows(sqlite_url, NOTE)
        at_once(waker.fall_asleep())
        assert not rung.is_set()
        rows(sqlite_url, f"INSERT INTO notes VALUES ({number})")
        assert rung.wait(HANG_SECONDS)
        at_once(waker.wake_up())
        rung.clear()


async def test_the_loop_goes_on(sqlite_url: str) -> None:
    """On an event loop, a file that is slow to read keeps no other task waiting."""
    store = stores.async_store(sqlite_url)
    waker = waker_of(store, "events", lambda: None)
    other = asyncio.ensure_future(asyncio.sleep(0))
    await waker.fall_asleep()
    assert other.done()
    await waker.close()
    await store.close()


def test_a_locked_file(waker: SQLiteWaker, rung: threading.Event, sqlite_url: str) -> None:
    """A file that is locked when the relay falls asleep is looked at as soon as it is free."""
    rows(sqlite_url, "PRAGMA journal_mode = DELETE")
    with closing(sqlite3.connect(sqlite_url.removeprefix("sqlite:///"), isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        at_once(waker.fall_asleep())
        other.execute(NOTE)
        other.execute("COMMIT")
    assert rung.wait(HANG_SECONDS)


def test_in_a_forked_child(waker: SQLiteWaker, sqlite_url: str) -> None:
    """A child of a process that watches watches for itself."""
    at_once(waker.fall_asleep())
    if (pid := os.fork()) == 0:  # pragma: no cover - another process
        at_once(waker.fall_asleep())
        os._exit(len(watching()))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1


_HAS_TRIED = "SELECT FROM pg_stat_activity WHERE query LIKE '%advisory%' AND pid <> pg_backend_pid()"


@pytest.mark.slow
def test_two_phase_commit() -> None:
    """Where transactions can be prepared, one that adds a message can, while a relay is idle; the relay finds it."""
    with servers.postgres(settings={"max_prepared_transactions": "5", "fsync": "off"}) as server:
        broker = Broker()
        with closing(stores.store(server.url)) as store, psycopg.connect(server.url, autocommit=True) as others:
            store.migrate()
            relay = relay_of(store, "events", broker)

            def is_idle() -> bool:
                assert relay.run_once().is_idle
                return others.execute(_HAS_TRIED).rowcount > 0

            until("the idle relay has tried to fall asleep", is_idle)
            with psycopg.connect(server.url) as connection:
                connection.tpc_begin("orders")
                Outbox(server.url).add(connection, "t", 1)
                connection.tpc_prepare()
                connection.tpc_commit()
            engine = create_engine(server.url.replace("postgresql", "postgresql+psycopg"))
            with Session(engine, twophase=True) as session:
                Outbox(engine).add(session, "t", 2)
                session.commit()
            engine.dispose()
            assert relay.run_once().sent == 2
    assert broker.payloads == ["1", "2"]
