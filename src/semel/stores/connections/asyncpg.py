"""Transactions on asyncpg: from a pool of the store's own, or from the application's. Which statements join them is
the stores' affair.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from typing import Any, Self, TypeVar, cast
from urllib.parse import unquote, urlsplit

from semel.core.commands import Begin, Open
from semel.errors import ConfigurationError, StoreError, StoreReadOnly
from semel.stores.connections.endings import (
    APPLICATION_NAME,
    COMMIT_SECONDS,
    FAILED_INSIDE,
    HAS_LOCK,
    RESET,
    ROLLBACK_SECONDS,
    WAIT_SECONDS,
    Notices,
    all_in_use,
    commit_sql,
    ended_inside,
    lost,
    of_commit,
    of_statement,
)
from semel.stores.connections.urls import postgres_url, unknown_address
from semel.stores.forks import leave_alone, start_afresh_in_children
from semel.stores.postgres.address import CONNECT_SECONDS, Address
from semel.stores.postgres.durability import FOR_TRANSACTION, is_off_async
from semel.stores.postgres.errors import unreachable
from semel.stores.postgres.pooler import is_direct_async
from semel.stores.statement import Joined
from semel.stores.transaction import AsyncConnections, AsyncUnit

try:
    import asyncpg
    from asyncpg.transaction import TransactionState
except ImportError as error:  # pragma: no cover - seen only where the extra is missing
    raise ImportError("PostgreSQL under an event loop needs asyncpg. Run: pip install 'semel[postgres]'") from error

T = TypeVar("T")

_MORE = "Add ?pool= with a higher number to the store's URL."
_MORE_OF_THEIRS = "Raise the max_size of the pool."

#: The last is what the driver says in the moment between the server's last word and the end of the connection.
_FAULTS = (asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError, asyncpg.InternalClientError)

#: What ``asyncpg.connect`` calls the parts of an address, and libpq.
_PARTS = {"host": "host", "port": "port", "user": "user", "database": "dbname"}

#: How a pool makes its connections. asyncpg keeps it for itself.
_HOW = ("_connect_args", "_connect_kwargs", "_connect", "_connection_class", "_record_class", "_init", "_setup")


class _Connection(asyncpg.Connection):
    """One of our own."""

    #: Whether it is to the server itself, and not to a pooler.
    is_direct = True
    #: Whether its COMMIT would be answered too early.
    is_off = False
    #: Whether the next statement is the BEGIN of a transaction of ours.
    is_beginning = False

    def get_reset_query(self) -> str:
        # A round trip after each request costs 30 %. What is to be reset is reset with the next BEGIN.
        return ""

    def commit_sql(self) -> str:
        """How to commit on it."""
        return commit_sql(is_direct=self.is_direct, is_off=self.is_off)

    async def execute(self, query: str, *arguments: Any, timeout: float | None = None) -> str:  # noqa: ASYNC109 - asyncpg's
        """Put before and behind a BEGIN what belongs to it. asyncpg sends that by itself, and must: it would not know
        of a transaction that was begun without it.
        """
        if self.is_beginning:
            self.is_beginning = False
            query = f"{RESET}; {query}" + (f" {FOR_TRANSACTION};" if self.is_off else "")
        return await super().execute(query, *arguments, timeout=timeout)


async def _connect(*arguments: Any, **named: Any) -> _Connection:
    """Connect; through a pooler, without the prepared statements that asyncpg makes of everything."""
    connection: Any = await asyncpg.connect(*arguments, **named)
    is_direct = await is_direct_async(connection)
    if not is_direct:
        await connection.close(timeout=CONNECT_SECONDS)
        connection = await asyncpg.connect(*arguments, **named, statement_cache_size=0)
    connection.is_direct, connection.is_off = is_direct, await is_off_async(connection)
    return cast("_Connection", connection)


class AsyncpgConnections(AsyncConnections):
    """Transactions on an event loop, on asyncpg."""

    def __init__(self, address: Address, pool: asyncpg.Pool[Any] | None = None) -> None:
        """Open a pool of its own on first use; or take from *pool*, which the application opens and closes."""
        self._address = address
        self.opener = address.opener
        self._given = pool
        self._own: asyncpg.Pool[Any] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        start_afresh_in_children(self)

    @classmethod
    def of(cls, pool: asyncpg.Pool[Any], url: str | None = None) -> Self:
        """Take connections from a pool of the application's. Without *url*, the store's own are made as the pool's."""
        return cls(Address.of(url or cls.url_of(pool), None if url else partial(_made_by, pool)), pool)

    @staticmethod
    def url_of(pool: asyncpg.Pool[Any]) -> str:
        """Name where *pool* connects to, as far as it says so beforehand."""
        arguments, named, *_ = _settings_of(pool)
        dsn = named.get("dsn") or (arguments[0] if arguments else None)
        parts = {ours: str(named[theirs]) for theirs, ours in _PARTS.items() if named.get(theirs) is not None}
        if dsn is None or parts:
            return postgres_url(parts)
        where = urlsplit(str(dsn))
        credentials, _, hosts = where.netloc.rpartition("@")
        if "," in hosts:
            user = credentials.partition(":")[0]
            return postgres_url({"user": unquote(user), "host": hosts, "dbname": unquote(where.path.lstrip("/"))})
        return str(dsn)

    async def begin(self, command: Begin | Open, opening: str | None = None) -> AsyncUnit:  # noqa: ARG002 - the same for both
        """Begin a transaction, *opening* with it."""
        pool = self._given or await self._opened()
        for is_last in (False, True):
            connection = await self._connection(pool)
            is_ours = self._given is None
            isolation = "read_committed" if is_ours else None
            transaction = connection.transaction(isolation=isolation)
            unit = _Unit(connection, transaction, pool, self._address, is_ours=is_ours)
            try:
                await unit.begin(opening)
            except StoreError:
                # The server was restarted, or another is the primary now: what is idle in the pool may be as useless.
                was_broken = unit.is_closed
                await unit.rollback()
                if is_last or not was_broken:
                    raise
                await pool.expire_connections()
            except BaseException:
                unit.drop()
                raise
            else:
                return unit
        raise AssertionError  # pragma: no cover - the last round returned or raised

    async def close(self) -> None:
        """Close the pool, if it is the store's own."""
        pool, self._own = self._own, None
        if pool is None:
            return
        if asyncio.get_running_loop() is self._loop:
            try:
                async with asyncio.timeout(CONNECT_SECONDS):
                    await pool.close()
            except _FAULTS:
                pool.terminate()
        else:
            _terminate(pool)

    def start_afresh(self) -> None:
        """Have no pool: its connections are the parent's."""
        leave_alone(self._own)
        self._own = None

    async def _opened(self) -> asyncpg.Pool[Any]:
        loop = asyncio.get_running_loop()
        if self._own is not None and self._loop is not loop:
            pool, self._own = self._own, None
            _terminate(pool)
        if self._own is None:
            self._loop = loop
            try:
                pool = asyncpg.create_pool(
                    self._address.url,
                    min_size=0,
                    max_size=self._address.pool,
                    connect=_connect,
                    connection_class=_Connection,
                    timeout=CONNECT_SECONDS,
                    server_settings={"application_name": APPLICATION_NAME},
                )
            except ValueError:
                # The driver's own words may quote the password, so they go no further.
                message = f"{self._address} can't be read as the address of a PostgreSQL server."
                raise ConfigurationError(message) from None
            # With no connection to begin with, this does not wait: nobody can come in between.
            await pool
            self._own = pool
        return self._own

    async def _connection(self, pool: asyncpg.Pool[Any]) -> Any:
        # Where one is free there is nothing to wait for, and a time limit costs a task of its own.
        limit = None if pool.get_idle_size() else WAIT_SECONDS
        try:
            return await pool.acquire(timeout=limit)
        except TimeoutError as error:
            if pool.get_idle_size() == 0 and pool.get_size() >= pool.get_max_size():
                how = _MORE if self._given is None else _MORE_OF_THEIRS
                raise all_in_use(self._address, pool.get_max_size(), how) from error
            raise unreachable(error, self._address) from error
        except _FAULTS as error:
            raise unreachable(error, self._address) from error


class _Unit(AsyncUnit):
    def __init__(
        self, connection: Any, transaction: Any, pool: asyncpg.Pool[Any], address: Address, *, is_ours: bool
    ) -> None:
        self.connection = connection
        # What the pool lends is a wrapper that can't be used after it was given back: right for an application, and
        # felt where a dozen calls go through it.
        self._inner = getattr(connection, "_con", None) or connection
        # Not asked of the connection: to asyncpg, every connection is an instance of every class of connections.
        self._own: _Connection | None = self._inner if is_ours else None
        self._transaction = transaction
        self._pool = pool
        self._address = address

    @property
    def is_closed(self) -> bool:
        """Whether the connection is gone. One that was lost is taken back by its pool, and can't be asked any more."""
        try:
            return bool(self._inner.is_closed())
        except asyncpg.InterfaceError:
            return True

    async def begin(self, opening: str | None) -> None:
        try:
            if opening is not None:
                await self._start_with(opening)
                return
            if self._own is not None:
                self._own.is_beginning = True
            await self._transaction.start()
        except _FAULTS as error:
            self._raise_known(error)
            raise

    async def _start_with(self, opening: str) -> None:
        # What start() does, whose BEGIN takes a round trip of its own. A block of the handler's, made by
        # connection.transaction(), has to find this one around it, and rollback() has to take it for begun.
        self._transaction._connection._top_xact = self._transaction  # noqa: SLF001 - as start() does
        self._transaction._state = TransactionState.STARTED  # noqa: SLF001 - as start() does
        begin = "BEGIN" if self._own is None else f"{RESET}; BEGIN ISOLATION LEVEL READ COMMITTED"
        if self._own is not None and self._own.is_off:
            begin = f"{begin}; {FOR_TRANSACTION}"
        self.has_lock = await self._inner.execute(f"{begin}; {opening}") == HAS_LOCK

    async def run(self, joined: Joined[T]) -> T:
        self._check_open()
        try:
            rows = await self._inner.fetch(joined.query.numbered, *joined.in_order)
        except _FAULTS as error:
            self._raise_known(error)
            raise
        except BaseException:
            self.drop()
            raise
        try:
            return joined.read(rows)
        except StoreReadOnly:
            if self._own is not None:
                # The last handler may have made its session so, which the RESET of a transaction that is begun
                # already can't undo; or it was the primary once. A new connection is neither.
                self.drop()
            raise

    async def commit(self) -> None:
        notices = Notices()
        try:
            self._check_before_commit()
            self._inner.add_log_listener(notices.from_asyncpg)
            # Its own commit() has no time limit and keeps the server's reply to itself.
            self._transaction._connection._top_xact = None  # noqa: SLF001 - as that one does before it sends
            tag = await self._inner.execute(self._own.commit_sql() if self._own else "COMMIT", timeout=COMMIT_SECONDS)
            self._inner.remove_log_listener(notices.from_asyncpg)
        except _FAULTS as error:
            known = of_commit(error, _sqlstate(error), self._address, is_lost=self.is_closed)
            if known is None:
                self._inner.remove_log_listener(notices.from_asyncpg)
                if self._inner.is_in_transaction():  # what was deferred has failed before COMMIT
                    self.drop()
                raise
            self.drop()
            raise known from error
        except BaseException:
            self.drop()
            raise
        finally:
            await self._let_go()
        if tag != "COMMIT":
            raise asyncpg.InFailedSQLTransactionError(FAILED_INSIDE)
        notices.check(self._address)

    async def rollback(self) -> None:
        await asyncio.shield(self._rollback())

    def drop(self) -> None:
        """Close the connection at once; the pool sees to the rest."""
        with suppress(*_FAULTS):
            self.connection.terminate()

    async def _rollback(self) -> None:
        try:
            async with asyncio.timeout(ROLLBACK_SECONDS):
                await self._transaction.rollback()
        except _FAULTS:
            self.drop()
        finally:
            await self._let_go()

    async def _let_go(self) -> None:
        # It is given back whether or not we are cancelled meanwhile: asyncpg sees to that. What goes wrong with a reset
        # of the application's own closes the connection, and is none of the transaction's.
        with suppress(*_FAULTS):
            await self._pool.release(self.connection)

    def _check_open(self) -> None:
        if not self.is_closed and not self._inner.is_in_transaction():
            raise ended_inside()

    def _check_before_commit(self) -> None:
        self._check_open()
        if self.is_closed:
            raise lost(self._address)

    def _raise_known(self, error: Exception) -> None:
        known = of_statement(error, _sqlstate(error), self._address)
        if known is not None:
            raise known from error


def _settings_of(pool: asyncpg.Pool[Any]) -> list[Any]:
    missing = object()
    settings = [getattr(pool, name, missing) for name in _HOW]
    if missing in settings:  # a release of asyncpg that keeps it elsewhere: rather none than another connection
        raise unknown_address("this asyncpg pool")
    return settings


async def _made_by(pool: asyncpg.Pool[Any]) -> asyncpg.Connection[Any]:
    """Make a connection as *pool* does, and keep it out of there."""
    arguments, named, connect, connection_class, record_class, *callbacks = _settings_of(pool)
    loop = asyncio.get_running_loop()
    connection: asyncpg.Connection[Any] = await connect(
        *arguments, loop=loop, connection_class=connection_class, record_class=record_class, **named
    )
    try:
        for callback in callbacks:
            if callback is not None:
                await callback(connection)
    except BaseException:
        connection.terminate()
        raise
    return connection


def _sqlstate(error: BaseException) -> str | None:
    return getattr(error, "sqlstate", None)


def _terminate(pool: asyncpg.Pool[Any]) -> None:
    with suppress(RuntimeError):  # the loop that it was opened on may be closed
        pool.terminate()
