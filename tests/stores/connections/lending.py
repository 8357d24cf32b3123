"""Every kind of connection that a transaction can be lent on, behind one face, so that each fact is tested once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import timedelta
from typing import Any

import asyncpg
import psycopg
import psycopg_pool
from psycopg.rows import dict_row
from sqlalchemy import create_engine, event, text
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import sessionmaker

from semel.core.commands import Open
from semel.stores.connections.asyncpg import AsyncpgConnections
from semel.stores.connections.psycopg import AsyncPsycopgConnections, PsycopgConnections
from semel.stores.connections.sqlalchemy import AsyncSQLAlchemyConnections, SQLAlchemyConnections
from semel.stores.postgres.address import Address
from semel.stores.statement import Joined, Query
from semel.stores.transaction import Connections, Unit

#: Long enough for a loaded machine; a test that waits this long has failed.
PATIENCE = timedelta(seconds=60)

SCHEMA = """
CREATE TABLE rides (id integer PRIMARY KEY);
CREATE TABLE records (key text PRIMARY KEY);
"""


def record(key: str) -> Joined[list[str]]:
    """Stand in for the statement with which a store writes its record."""
    query = Query("INSERT INTO records (key) VALUES (CAST(:key AS text)) RETURNING key")
    return Joined(query, {"key": key}, lambda rows: [row[0] for row in rows])


def backend() -> Joined[int]:
    return Joined(Query("SELECT pg_backend_pid()"), {}, lambda rows: int(rows[0][0]))


class Lent:
    """One open transaction, in either colour."""

    def __init__(self, unit: Any, *, is_sqlalchemy: bool) -> None:
        self.unit = unit
        self.connection = unit.connection
        self._is_sqlalchemy = is_sqlalchemy

    async def execute(self, sql: str) -> None:
        """Do as a handler does."""
        await self._do(self.connection.execute, text(sql) if self._is_sqlalchemy else sql)

    async def run(self, joined: Joined[Any]) -> Any:
        return await self._do(self.unit.run, joined)

    async def commit(self) -> None:
        await self._do(self.unit.commit)

    async def rollback(self) -> None:
        await self._do(self.unit.rollback)

    async def commit_inside(self) -> None:
        """End the transaction as a handler must not."""
        if isinstance(self.connection, asyncpg.pool.PoolConnectionProxy):
            await self.connection.execute("COMMIT")
        else:
            await self._do(self.connection.commit)

    async def _do(self, call: Callable[..., Any], *arguments: Any) -> Any:
        if isinstance(self.unit, Unit):
            return await asyncio.to_thread(call, *arguments)
        return await call(*arguments)


class Lender:
    """One kind of connections."""

    def __init__(self, connections: Any, *, is_sqlalchemy: bool) -> None:
        self.connections = connections
        self._is_sqlalchemy = is_sqlalchemy

    async def begin(self) -> Lent:
        if isinstance(self.connections, Connections):
            unit = await asyncio.to_thread(self.connections.begin, Open())
        else:
            unit = await self.connections.begin(Open())
        return Lent(unit, is_sqlalchemy=self._is_sqlalchemy)


Kind = Callable[[str], AbstractAsyncContextManager[Lender]]


@asynccontextmanager
async def own_psycopg(url: str) -> AsyncIterator[Lender]:
    connections = PsycopgConnections(Address.of(url + "?pool=2"))
    yield Lender(connections, is_sqlalchemy=False)
    await asyncio.to_thread(connections.close)


@asynccontextmanager
async def given_psycopg(url: str) -> AsyncIterator[Lender]:
    # Rows that are no tuples, and no autocommit, as many applications have it.
    with psycopg_pool.ConnectionPool(url, kwargs={"row_factory": dict_row}, min_size=0, max_size=2, open=True) as pool:
        yield Lender(PsycopgConnections.of(pool), is_sqlalchemy=False)


@asynccontextmanager
async def given_async_psycopg(url: str) -> AsyncIterator[Lender]:
    pool = psycopg_pool.AsyncConnectionPool(url, kwargs={"row_factory": dict_row}, min_size=0, max_size=2, open=False)
    async with pool:
        yield Lender(AsyncPsycopgConnections.of(pool), is_sqlalchemy=False)


@asynccontextmanager
async def own_asyncpg(url: str) -> AsyncIterator[Lender]:
    connections = AsyncpgConnections(Address.of(url + "?pool=2"))
    yield Lender(connections, is_sqlalchemy=False)
    await connections.close()


@asynccontextmanager
async def given_asyncpg(url: str) -> AsyncIterator[Lender]:
    async with asyncpg.create_pool(url, min_size=0, max_size=2) as pool:
        yield Lender(AsyncpgConnections.of(pool), is_sqlalchemy=False)


def engine(driver: str, *, session: bool = False, begins: bool = False) -> Kind:
    @asynccontextmanager
    async def lend(url: str) -> AsyncIterator[Lender]:
        options = {"pool_size": 2, "max_overflow": 0, "pool_timeout": 0.2}
        made = create_engine(driver + url[url.index(":") :], **options)
        if begins:
            event.listen(made, "begin", lambda connection: connection.exec_driver_sql("BEGIN"))
        given = sessionmaker(made) if session else made
        yield Lender(SQLAlchemyConnections(given), is_sqlalchemy=True)
        await asyncio.to_thread(made.dispose)

    return lend


def async_engine(driver: str, *, session: bool = False) -> Kind:
    @asynccontextmanager
    async def lend(url: str) -> AsyncIterator[Lender]:
        options = {"pool_size": 2, "max_overflow": 0, "pool_timeout": 0.2}
        made = create_async_engine(driver + url[url.index(":") :], **options)
        given = async_sessionmaker(made) if session else made
        yield Lender(AsyncSQLAlchemyConnections(given), is_sqlalchemy=True)
        await made.dispose()

    return lend


DRIVERS: dict[str, Kind] = {
    "psycopg": own_psycopg,
    "psycopg pool": given_psycopg,
    "psycopg async pool": given_async_psycopg,
    "asyncpg": own_asyncpg,
    "asyncpg pool": given_asyncpg,
}
SQLALCHEMY: dict[str, Kind] = {
    "engine psycopg": engine("postgresql+psycopg"),
    "session psycopg": engine("postgresql+psycopg", session=True),
    "async engine psycopg": async_engine("postgresql+psycopg"),
    "async engine asyncpg": async_engine("postgresql+asyncpg"),
    "async session asyncpg": async_engine("postgresql+asyncpg", session=True),
}
SQLITE: dict[str, Kind] = {
    "engine sqlite": engine("sqlite"),
    "engine sqlite that begins": engine("sqlite", begins=True),
    "session sqlite": engine("sqlite", session=True),
    "async engine sqlite": async_engine("sqlite+aiosqlite"),
    "async session sqlite": async_engine("sqlite+aiosqlite", session=True),
}


async def rows(url: str, sql: str) -> list[Any]:
    """Ask as somebody else."""
    connection = await psycopg.AsyncConnection.connect(url, autocommit=True)
    async with connection:
        return [row[0] for row in await (await connection.execute(sql.encode())).fetchall()]


async def do(url: str, sql: str) -> None:
    """Do something as somebody else."""
    connection = await psycopg.AsyncConnection.connect(url, autocommit=True)
    async with connection:
        await connection.execute(sql.encode(), prepare=False)


async def until(url: str, sql: str) -> None:
    """Wait until *sql* has a row that says true."""
    async with asyncio.timeout(PATIENCE.total_seconds()):
        while not any(await rows(url, sql)):  # noqa: ASYNC110 - the server has no event for us
            await asyncio.sleep(0.01)
