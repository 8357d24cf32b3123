"""Databases with Semel's tables, and publishers whose verdicts a test decides."""

import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest

from semel import stores
from semel.core.outbox import BROKER_SCHEDULE, Delivered, Message, Schedule, Verdict
from semel.publishers import Publisher
from semel.stores import AsyncStore, Store
from semel.work.relay import Relay


@pytest.fixture
def postgres_url(migrated_postgres_url: str) -> str:
    return migrated_postgres_url


@pytest.fixture
def sqlite_url(sqlite_url: str) -> str:
    with closing(stores.store(sqlite_url)) as store:
        store.migrate()
    return sqlite_url


@pytest.fixture(params=["postgres_url", "sqlite_url"])
def url(request: pytest.FixtureRequest) -> str:
    found: str = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with closing(stores.store(url)) as opened:
        yield opened


@pytest.fixture
async def async_store(url: str) -> AsyncIterator[AsyncStore]:
    opened = stores.async_store(url)
    yield opened
    await opened.close()


class Broker:
    """Keeps what it is sent, and answers as the test says."""

    schedule: Schedule = BROKER_SCHEDULE

    def __init__(self) -> None:
        self.got: list[Message] = []
        self.tried: list[Message] = []
        self.opened = 0
        self.closed = 0
        self.answer: Callable[[Message], Verdict] = lambda _: Delivered()

    async def open(self) -> None:
        self.opened += 1

    async def publish(self, messages: Sequence[Message]) -> Sequence[Verdict]:
        verdicts = []
        for message in messages:
            self.tried.append(message)
            verdict = self.answer(message)
            if isinstance(verdict, Delivered):
                self.got.append(message)
            verdicts.append(verdict)
        return verdicts

    async def close(self) -> None:
        self.closed += 1

    @property
    def payloads(self) -> list[str]:
        return [message.payload.decode() for message in self.got]


@pytest.fixture
def broker() -> Broker:
    return Broker()


_open: list[Relay[Store]] = []


def relay_of(store: Store, to: str, broker: Publisher, **how: Any) -> Relay[Store]:
    """A relay that is closed when the test is over."""
    _open.append(Relay(store, to, broker, **how))
    return _open[-1]


@pytest.fixture(autouse=True)
def relays_are_closed() -> Iterator[None]:
    yield
    while _open:
        _open.pop().close()


def connect(url: str) -> Any:
    """A connection to the database, in a transaction of its own."""
    if url.startswith("sqlite"):
        return sqlite3.connect(urlsplit(url).path[1:], timeout=60)
    return psycopg.connect(url)


def rows(url: str, sql: str) -> list[Any]:
    """What a statement returns; and what it did is committed."""
    with closing(connect(url)) as connection:
        cursor = connection.execute(sql)
        found = cursor.fetchall() if cursor.description else []
        connection.commit()
        return [row[0] if len(row) == 1 else tuple(row) for row in found]
