"""A consumer that ships parcels, behind every kind of connection that a handler can be given, in its own colour."""

import asyncio
import sqlite3
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import asyncpg
import psycopg
import psycopg_pool
from sqlalchemy import text
from sqlalchemy.ext.asyncio import async_sessionmaker
from sqlalchemy.orm import sessionmaker

from semel import stores
from semel.inbox import AsyncInbox, Inbox, Verdict
from tests.web.lenders import ASYNC, ASYNC_SQLITE, CROWD, SYNC, SYNC_SQLITE, _async_engine, _engine

HANG_SECONDS = 60
TABLE = "CREATE TABLE parcels (message VARCHAR(50) NOT NULL)"

Make = Callable[[str], Any] | None

SYNC_KINDS: dict[str, Make] = {
    **SYNC,
    **SYNC_SQLITE,
    "session sqlite": lambda url: sessionmaker(_engine("sqlite", url)),
}
ASYNC_KINDS: dict[str, Make] = {
    **ASYNC,
    **ASYNC_SQLITE,
    "async session sqlite": lambda url: async_sessionmaker(_async_engine("sqlite+aiosqlite", url)),
}
KINDS = (*SYNC_KINDS, *ASYNC_KINDS)
SQLITE_KINDS = tuple(name for name in KINDS if "sqlite" in name)
POSTGRES_KINDS = tuple(name for name in KINDS if "sqlite" not in name)
#: With transactions in the isolation that the application, or its database, says.
GIVEN_KINDS = tuple(name for name in POSTGRES_KINDS if name not in {"psycopg", "asyncpg"})
#: One of each colour on each database: for facts that the kind of connection does not change.
USUAL = ("psycopg", "asyncpg", "sqlite", "async sqlite")


class Consumer:
    """One process's consumer. *then* is called in the handler after its INSERT."""

    def __init__(self, kind: str, url: str, **settings: Any) -> None:
        self.kind, self.url = kind, url
        self.runs = 0
        self.then: Callable[[], object] = lambda: None
        self.threads = ThreadPoolExecutor(CROWD)
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.is_async = kind in ASYNC_KINDS
        settings = {"consumer": "billing", **settings}
        make = (ASYNC_KINDS | SYNC_KINDS)[kind]
        self.inbox: Any
        if self.is_async:
            self.given = self._on_loop(self._opened(make, url)) if make else None
            self.inbox = AsyncInbox(url if self.given is None else self.given, **settings)
        else:
            self.given = make(url) if make else None
            self.inbox = Inbox(url if self.given is None else self.given, **settings)

    def start(self, message: str, payload: object = None) -> "Future[Verdict[Any]]":
        if self.is_async:
            receiving = self.inbox.receive(message, self._ship_async, message, payload=payload)
            return asyncio.run_coroutine_threadsafe(receiving, self.loop)
        return self.threads.submit(self.inbox.receive, message, self._ship, message, payload=payload)

    def receive(self, message: str, payload: object = None) -> Verdict[Any]:
        return self.start(message, payload).result(HANG_SECONDS)

    def close(self) -> None:
        bound = getattr(self.given, "kw", {}).get("bind", self.given)
        if self.is_async:
            self._on_loop(self.inbox.close())
            if bound is not None:
                self._on_loop(bound.dispose() if hasattr(bound, "dispose") else bound.close())
        else:
            self.inbox.close()
            if bound is not None:
                (bound.dispose if hasattr(bound, "dispose") else bound.close)()
        self.threads.shutdown()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()

    def _on_loop(self, running: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(running, self.loop).result(HANG_SECONDS)

    async def _opened(self, make: Callable[[str], Any], url: str) -> Any:
        given = make(url)
        if isinstance(given, psycopg_pool.AsyncConnectionPool):
            await given.open()
        elif isinstance(given, asyncpg.Pool):
            await given
        return given

    def _write(self, connection: Any, message: str) -> Any:
        self.runs += 1
        sql = f"INSERT INTO parcels VALUES ('{message}')"
        return connection.execute(text(sql) if type(connection).__module__.startswith("sqlalchemy") else sql)

    def _ship(self, connection: Any, message: str) -> str:
        self._write(connection, message)
        self.then()
        return f"shipped {message}"

    async def _ship_async(self, connection: Any, message: str) -> str:
        done = self._write(connection, message)
        if hasattr(done, "__await__"):
            await done
        await asyncio.to_thread(self.then)
        return f"shipped {message}"


@contextmanager
def consumer(kind: str, url: str, **settings: Any) -> Iterator[Consumer]:
    made = Consumer(kind, url, **settings)
    try:
        yield made
    finally:
        made.close()


def prepare(url: str) -> None:
    """Make the tables: Semel's, and the parcels."""
    with closing(stores.store(url)) as opened:
        opened.migrate()
    execute(url, TABLE)


def execute(url: str, sql: str) -> list[tuple[Any, ...]]:
    """Run a statement on a connection of the test's own, and commit it."""
    if url.startswith("sqlite"):
        path = Path(url.removeprefix("sqlite:///"))
        with closing(sqlite3.connect(path, timeout=60, isolation_level=None)) as connection:
            return connection.execute(sql).fetchall()
    with psycopg.connect(url, autocommit=True) as other:
        cursor = other.execute(sql.encode())
        return cursor.fetchall() if cursor.description else []


def parcels(url: str) -> list[str]:
    return sorted(message for (message,) in execute(url, "SELECT message FROM parcels"))


def receipts(url: str, consumer: str = "billing") -> dict[str, tuple[str, int]]:
    rows = execute(url, f"SELECT message_id, state, attempts FROM semel_inbox WHERE consumer = '{consumer}'")
    return {message: (state, attempts) for message, state, attempts in rows}


async def until(is_so: Callable[[], bool]) -> None:
    """Look again and again, until it is so."""
    for _ in range(HANG_SECONDS * 50):
        if is_so():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("It never happened.")
