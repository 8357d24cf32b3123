"""Databases with a table of orders in them, and ways to open entry points to them that are closed again."""

import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, closing
from urllib.parse import urlsplit

import psycopg
import pytest

from tests.natural.entries import POSTGRES, POSTGRES_SCHEMA, SQLITE, SQLITE_SCHEMA, Entry

Opener = Callable[[], Awaitable[Entry]]


@pytest.fixture
def postgres_shop(postgres_url: str) -> str:
    """The URL of a PostgreSQL database that has the table."""
    with psycopg.connect(postgres_url) as connection:
        connection.execute(POSTGRES_SCHEMA)
    return postgres_url


@pytest.fixture
def sqlite_shop(sqlite_url: str) -> str:
    """The URL of a SQLite file that has the table."""
    with closing(sqlite3.connect(urlsplit(sqlite_url).path[1:])) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(SQLITE_SCHEMA)
    return sqlite_url


async def opener(kind: type[Entry], url: str) -> AsyncIterator[Opener]:
    async with AsyncExitStack() as stack:

        async def open_entry() -> Entry:
            entry = kind()
            await entry.open(url)
            stack.push_async_callback(entry.close)
            return entry

        yield open_entry


@pytest.fixture(params=POSTGRES, ids=lambda kind: kind.__name__)
async def open_postgres(request: pytest.FixtureRequest, postgres_shop: str) -> AsyncIterator[Opener]:
    """Opens an entry point to PostgreSQL, for each driver in turn."""
    async for each in opener(request.param, postgres_shop):
        yield each


@pytest.fixture(
    params=[*((kind, "postgres_shop") for kind in POSTGRES), *((kind, "sqlite_shop") for kind in SQLITE)],
    ids=lambda param: f"{param[0].__name__}-{param[1].partition('_')[0]}",
)
async def open_entry(request: pytest.FixtureRequest) -> AsyncIterator[Opener]:
    """Opens an entry point to PostgreSQL or SQLite, for each driver in turn."""
    kind, shop = request.param
    async for each in opener(kind, request.getfixturevalue(shop)):
        yield each
