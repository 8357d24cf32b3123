"""Every store of Semel's, in both colours, passes the one suite that any store must pass."""

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import urlsplit
from uuid import uuid4

import psycopg
import pytest

from semel import stores
from semel.stores.base import AsyncStore, Store
from semel.stores.memory import AsyncMemoryStore, MemoryStore
from semel.testing import servers
from semel.testing.conformance import Candidate, StoreConformance

Open = Callable[[str], Store | AsyncStore]

TIMES = ("created_at", "lease_expires_at", "completed_at", "expires_at")


class MovableClock:
    """The system's clock, put forward now and then."""

    def __init__(self) -> None:
        self.ahead = timedelta(0)

    def __call__(self) -> datetime:
        return datetime.now(UTC) + self.ahead  # noqa: TID251 - the memory store has no other

    def move(self, duration: timedelta) -> None:
        self.ahead += duration


class TestMemory(StoreConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def candidate(cls) -> Candidate:
        clock = MovableClock()
        memory = MemoryStore(clock=clock)
        return Candidate(open=lambda: memory, age=clock.move)


class TestAsyncMemory(StoreConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def candidate(cls) -> Candidate:
        clock = MovableClock()
        memory = MemoryStore(clock=clock)
        return Candidate(open=lambda: AsyncMemoryStore(memory=memory), age=clock.move)


def sqlite_candidate(path: Path, open_store: Open) -> Candidate:
    def age(duration: timedelta) -> None:
        back = ", ".join(f"{time} = {time} - :milliseconds" for time in TIMES)
        with closing(sqlite3.connect(path, timeout=60)) as connection, connection:
            by = {"milliseconds": duration // timedelta(milliseconds=1)}
            connection.execute(f"UPDATE semel_keys SET {back}", by)
            connection.execute("UPDATE semel_audit SET at = at - :milliseconds", by)

    return Candidate(open=lambda: open_store(f"sqlite:///{path}"), age=age)


class TestSQLite(StoreConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def candidate(cls, tmp_path_factory: pytest.TempPathFactory) -> Candidate:
        return sqlite_candidate(tmp_path_factory.mktemp("sqlite") / "semel.db", stores.store)


class TestAsyncSQLite(StoreConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def candidate(cls, tmp_path_factory: pytest.TempPathFactory) -> Candidate:
        return sqlite_candidate(tmp_path_factory.mktemp("sqlite") / "semel.db", stores.async_store)


def postgres_candidate(server: servers.PostgresServer, open_store: Open) -> Iterator[Candidate]:
    name = f"semel_{uuid4().hex}"
    url = urlsplit(server.url)._replace(path=f"/{name}").geturl()

    def age(duration: timedelta) -> None:
        back = ", ".join(f"{time} = {time} - %(duration)s" for time in TIMES)
        with psycopg.connect(url) as connection:
            connection.execute(f"UPDATE semel_keys SET {back}".encode(), {"duration": duration})
            connection.execute("UPDATE semel_audit SET at = at - %(duration)s", {"duration": duration})

    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}".encode())
        with closing(stores.store(url)) as store:
            store.migrate()
        yield Candidate(open=lambda: open_store(url), age=age)
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


class TestPostgres(StoreConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def candidate(cls, postgres_server: servers.PostgresServer) -> Iterator[Candidate]:
        yield from postgres_candidate(postgres_server, stores.store)


class TestAsyncPostgres(StoreConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def candidate(cls, postgres_server: servers.PostgresServer) -> Iterator[Candidate]:
        yield from postgres_candidate(postgres_server, stores.async_store)
