"""Every driver that natural keys work with, behind one face: open, ask, end. It asserts nothing."""

from __future__ import annotations

import asyncio
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import psycopg
from sqlalchemy import Column, Integer, MetaData, Numeric, String, Table, UniqueConstraint, create_engine
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from semel.natural import Got, insert_or_get

POSTGRES_SCHEMA = """
CREATE TABLE orders (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    merchant integer NOT NULL,
    number text NOT NULL,
    total numeric(10, 2),
    status text DEFAULT 'new',
    UNIQUE (merchant, number)
)
"""
SQLITE_SCHEMA = """
CREATE TABLE orders (
    id INTEGER PRIMARY KEY,
    merchant INTEGER NOT NULL,
    number TEXT NOT NULL,
    total NUMERIC,
    status TEXT DEFAULT 'new',
    UNIQUE (merchant, number)
)
"""
ORDERS = Table(
    "orders",
    MetaData(),
    Column("id", Integer, primary_key=True),
    Column("merchant", Integer, nullable=False),
    Column("number", String, nullable=False),
    Column("total", Numeric(asdecimal=False)),
    Column("status", String, server_default="new"),
    UniqueConstraint("merchant", "number"),
)

KEY = ("merchant", "number")


class Entry(ABC):
    """One connection, and the transaction that is open on it."""

    #: What the driver takes for the table.
    orders: Any = "orders"

    @abstractmethod
    async def open(self, url: str) -> None: ...
    @abstractmethod
    async def ask(self, into: Any, values: Mapping[str, Any], **settings: Any) -> Got[Any]: ...
    @abstractmethod
    async def run(self, sql: str) -> None: ...
    @abstractmethod
    async def commit(self) -> None: ...
    @abstractmethod
    async def rollback(self) -> None: ...
    @abstractmethod
    async def close(self) -> None: ...

    async def order(self, merchant: int = 7, number: str = "A-17", **more: Any) -> Got[Any]:
        settings = {name: more.pop(name) for name in ("same", "where") if name in more}
        return await self.ask(self.orders, {"merchant": merchant, "number": number, **more}, unique=KEY, **settings)


class SyncEntry(Entry):
    """What blocks goes to a thread of its own, so that many can wait for each other."""

    connection: Any
    connect: Callable[[str], Any]

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)

    async def there(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, partial(function, *args, **kwargs))

    async def open(self, url: str) -> None:
        self.connection = await self.there(self.connect, url)

    async def ask(self, into: Any, values: Mapping[str, Any], **settings: Any) -> Got[Any]:
        got: Got[Any] = await self.there(insert_or_get, self.connection, into, values, **settings)
        return got

    async def run(self, sql: str) -> None:
        await self.there(self.connection.execute, sql)

    async def commit(self) -> None:
        await self.there(self.connection.commit)

    async def rollback(self) -> None:
        await self.there(self.connection.rollback)

    async def close(self) -> None:
        await self.there(self.connection.close)
        self._thread.shutdown()


class AsyncEntry(Entry):
    connection: Any

    async def ask(self, into: Any, values: Mapping[str, Any], **settings: Any) -> Got[Any]:
        got: Got[Any] = await insert_or_get(self.connection, into, values, **settings)
        return got

    async def run(self, sql: str) -> None:
        await self.connection.execute(sql)

    async def commit(self) -> None:
        await self.connection.commit()

    async def rollback(self) -> None:
        await self.connection.rollback()

    async def close(self) -> None:
        await self.connection.close()


class Psycopg(SyncEntry):
    connect = staticmethod(psycopg.connect)


class AsyncPsycopg(AsyncEntry):
    async def open(self, url: str) -> None:
        self.connection = await psycopg.AsyncConnection.connect(url)


class Asyncpg(AsyncEntry):
    async def open(self, url: str) -> None:
        self.connection = await asyncpg.connect(url)
        await self._begin()

    async def _begin(self) -> None:
        self._transaction = self.connection.transaction()
        await self._transaction.start()

    async def commit(self) -> None:
        await self._transaction.commit()
        await self._begin()

    async def rollback(self) -> None:
        await self._transaction.rollback()
        await self._begin()

    async def close(self) -> None:
        await self._transaction.rollback()
        await self.connection.close()


class Sqlite3(SyncEntry):
    def connect(self, url: str) -> sqlite3.Connection:
        return sqlite3.connect(urlsplit(url).path[1:], timeout=60)


class SQLAlchemyConnection(SyncEntry):
    orders = ORDERS

    def connect(self, url: str) -> Any:
        self._engine = create_engine(with_driver(url, "psycopg"), **settings_of(url))
        return self._engine.connect()

    async def run(self, sql: str) -> None:
        await self.there(self.connection.exec_driver_sql, sql)

    async def close(self) -> None:
        await self.there(self.connection.close)
        await self.there(self._engine.dispose)
        self._thread.shutdown()


class SQLAlchemySession(SQLAlchemyConnection):
    def connect(self, url: str) -> Any:
        self._engine = create_engine(with_driver(url, "psycopg"), **settings_of(url))
        return Session(self._engine)

    async def run(self, sql: str) -> None:
        await self.there(lambda: self.connection.connection().exec_driver_sql(sql))


class AsyncSQLAlchemyConnection(AsyncEntry):
    orders = ORDERS

    async def open(self, url: str) -> None:
        self._engine = create_async_engine(with_driver(url, "asyncpg"), **settings_of(url))
        self.connection = await self._engine.connect()

    async def run(self, sql: str) -> None:
        await self.connection.exec_driver_sql(sql)

    async def close(self) -> None:
        await super().close()
        await self._engine.dispose()


class AsyncSQLAlchemySession(AsyncSQLAlchemyConnection):
    async def open(self, url: str) -> None:
        self._engine = create_async_engine(with_driver(url, "asyncpg"), **settings_of(url))
        self.connection = AsyncSession(self._engine)

    async def run(self, sql: str) -> None:
        await (await self.connection.connection()).exec_driver_sql(sql)


POSTGRES: list[type[Entry]] = [
    Psycopg,
    AsyncPsycopg,
    Asyncpg,
    SQLAlchemyConnection,
    SQLAlchemySession,
    AsyncSQLAlchemyConnection,
    AsyncSQLAlchemySession,
]
SQLITE: list[type[Entry]] = [
    Sqlite3,
    SQLAlchemyConnection,
    SQLAlchemySession,
    AsyncSQLAlchemyConnection,
    AsyncSQLAlchemySession,
]


def with_driver(url: str, driver: str) -> str:
    """Spell a URL as SQLAlchemy does, for this driver or SQLite's counterpart of it."""
    scheme, rest = url.split(":", 1)
    if scheme == "sqlite":
        return f"sqlite+aiosqlite:{rest}" if driver == "asyncpg" else url
    return f"postgresql+{driver}:{rest}"


def settings_of(url: str) -> dict[str, Any]:
    if url.startswith("sqlite"):
        return {"connect_args": {"timeout": 60}}
    return {}
