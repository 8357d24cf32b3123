"""Transactions on psycopg, in both colours: from a pool of the store's own, or from the application's. How they begin
and end is in ``postgres.py``, which statements join them is the stores' affair.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from inspect import isawaitable
from threading import Lock
from typing import Any, Self

from semel.stores.connections.endings import (
    APPLICATION_NAME,
    FAILED_INSIDE,
    MORE,
    MORE_OF_THEIRS,
    WAIT_SECONDS,
    Notices,
    all_in_use,
    hang_up,
)
from semel.stores.connections.pool import AllInUse, Pool
from semel.stores.connections.postgres import AsyncPostgresConnections, PostgresConnections, Session, Status
from semel.stores.connections.urls import postgres_url, unknown_address
from semel.stores.forks import leave_alone, start_afresh_in_children
from semel.stores.postgres.address import CONNECT_SECONDS, Address
from semel.stores.postgres.durability import is_off
from semel.stores.postgres.encoding import ENCODING
from semel.stores.postgres.errors import unreachable
from semel.stores.postgres.network import STATEMENTS
from semel.stores.postgres.opening import as_given
from semel.stores.postgres.pooler import is_direct

try:
    import psycopg
    from psycopg.conninfo import conninfo_to_dict
    from psycopg.pq import TransactionStatus
    from psycopg.rows import tuple_row
    from psycopg_pool import AsyncConnectionPool, ConnectionPool, PoolTimeout
except ImportError as error:  # pragma: no cover - seen only where the extra is missing
    raise ImportError("PostgreSQL needs psycopg and its pool. Run: pip install 'semel[postgres]'") from error

#: What an address is made of.
_PARTS = ("dbname", "host", "hostaddr", "port", "user")

#: The handler's own statements run on it, so it has none of the settings that suit ours alone.
_SESSION: dict[str, Any] = {
    "autocommit": True,
    "prepare_threshold": 0,
    "connect_timeout": CONNECT_SECONDS,
    "client_encoding": ENCODING,
    **STATEMENTS,
    "fallback_application_name": APPLICATION_NAME,
}

_STATUS = {
    TransactionStatus.IDLE: Status.IDLE,
    TransactionStatus.INTRANS: Status.OPEN,
    TransactionStatus.INERROR: Status.FAILED,
}


class PsycopgConnections(PostgresConnections):
    """Transactions for threads, on psycopg."""

    def __init__(self, address: Address, pool: ConnectionPool[Any] | None = None) -> None:
        """Open a pool of its own on first use; or take from *pool*, which the application opens and closes."""
        super().__init__(address)
        self._given = pool
        self._own: Pool[_Connection] | None = None
        self._lock = Lock()
        start_afresh_in_children(self)

    @classmethod
    def of(cls, pool: ConnectionPool[Any], url: str | None = None) -> Self:
        """Take connections from a pool of the application's. Without *url*, the store's own are made as the pool's."""
        return cls(Address.of(url or cls.url_of(pool), None if url else partial(_made_by, pool)), pool)

    @staticmethod
    def url_of(pool: ConnectionPool[Any]) -> str:
        """Return where *pool* connects to."""
        return _pool_url(pool)

    def close(self) -> None:
        """Close the pool, if it is the store's own."""
        with self._lock:
            pool, self._own = self._own, None
        if pool is not None:
            pool.idle.close()

    def start_afresh(self) -> None:
        """Have no pool: its connections are the parent's."""
        leave_alone(self._own)
        self._own = None
        self._lock = Lock()

    async def take(self) -> _Executor:
        """Return a connection of the pool's."""
        if self._given is None:
            pool = self._opened()
            try:
                return _Executor(connection := pool.take(WAIT_SECONDS), pool, connection.session)
            except AllInUse:
                raise all_in_use(self.address, pool.size, MORE) from None
            except psycopg.Error as error:
                raise unreachable(error, self.address) from error
        try:
            return _Executor(self._given.getconn(timeout=WAIT_SECONDS), self._given)
        except PoolTimeout as error:
            self._probe()  # a pool that can't connect has nothing to give either, and says the same
            raise all_in_use(self.address, self._given.max_size, MORE_OF_THEIRS) from error
        except psycopg.Error as error:  # the pool is closed, or has a limit on those who wait
            raise unreachable(error, self.address) from error

    async def renew(self) -> None:
        """Replace what is idle in the pool."""
        if self._given is None:
            self._opened().idle.drop()
        else:
            self._given.check()

    def _opened(self) -> Pool[_Connection]:
        with self._lock:
            if self._own is None:
                connect = partial(_Connection.opened, self.address.url)
                self._own = Pool(self.address.pool, connect, _Connection.close)
            return self._own

    def _probe(self) -> None:
        try:
            if self.address.opener is None:
                psycopg.connect(self.address.url, **_SESSION).close()
            else:
                as_given(self.address, {}).close()
        except psycopg.Error as error:
            raise unreachable(error, self.address) from error


class AsyncPsycopgConnections(AsyncPostgresConnections):
    """Transactions on an event loop, on psycopg. The pool is the application's."""

    def __init__(self, address: Address, pool: AsyncConnectionPool[Any]) -> None:
        """Take from *pool*, which the application opens and closes."""
        super().__init__(address)
        self._pool = pool

    @classmethod
    def of(cls, pool: AsyncConnectionPool[Any], url: str | None = None) -> Self:
        """Take connections from a pool of the application's. Without *url*, the store's own are made as the pool's."""
        return cls(Address.of(url or cls.url_of(pool), None if url else partial(_async_made_by, pool)), pool)

    @staticmethod
    def url_of(pool: AsyncConnectionPool[Any]) -> str:
        """Return where *pool* connects to."""
        return _pool_url(pool)

    async def close(self) -> None:
        """Leave the pool alone: it is the application's."""

    async def take(self) -> _AsyncExecutor:
        """Return a connection of the pool's."""
        try:
            return _AsyncExecutor(await self._pool.getconn(timeout=WAIT_SECONDS), self._pool)
        except PoolTimeout as error:
            await self._probe()  # a pool that can't connect has nothing to give either, and says the same
            raise all_in_use(self.address, self._pool.max_size, MORE_OF_THEIRS) from error
        except psycopg.Error as error:
            raise unreachable(error, self.address) from error

    async def renew(self) -> None:
        """Replace what is idle in the pool."""
        await self._pool.check()

    async def _probe(self) -> None:
        connect: Any = partial(psycopg.AsyncConnection.connect, self.address.url, **_SESSION)
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                await (await (self.address.opener or connect)()).close()
        except (psycopg.Error, OSError) as error:
            raise unreachable(error, self.address) from error


class _Connection(psycopg.Connection[Any]):
    """One of our own."""

    session: Session

    def _deallocate(self, name: bytes | None) -> Any:
        # What psycopg does once a transaction was rolled back, or a table dropped: None is all that the session has
        # prepared, ours included. Should psycopg do it otherwise one day, the statement fails and the session goes.
        if name is None and hasattr(self, "session"):
            self.session.prepared.forget()
        return super()._deallocate(name)

    @classmethod
    def opened(cls, url: str) -> Self:
        """Connect, and find out what it is."""
        made = cls.connect(url, **_SESSION)
        made.session = Session(is_direct=is_direct(made), is_off=is_off(made))
        made.add_notice_handler(made.session.notices.from_psycopg)
        if not made.session.is_direct:
            made.prepare_threshold = None
        return made


class _AnyExecutor:
    """What does not wait."""

    faults: tuple[type[Exception], ...] = (psycopg.Error, TimeoutError)

    def __init__(self, connection: Any, pool: Any, session: Session | None = None) -> None:
        self.connection = connection
        self.session = session
        self._pool = pool
        self._was_autocommit = connection.autocommit
        self._factories = connection.row_factory, connection.cursor_factory

    @property
    def status(self) -> Status:
        return _STATUS.get(self.connection.info.transaction_status, Status.LOST)

    def begin_sql(self) -> str:
        connection = self.connection
        level = connection.isolation_level
        modes = [f"ISOLATION LEVEL {level.name.replace('_', ' ')}"] if level else []
        if connection.read_only:
            modes.append("READ ONLY")
        elif connection.info.parameter_status("default_transaction_read_only") != "on":
            modes.append("DEFERRABLE")
        return f"BEGIN {', '.join(modes)}".rstrip()

    def hear(self, notices: Notices, *, listens: bool) -> None:
        change = self.connection.add_notice_handler if listens else self.connection.remove_notice_handler
        change(notices.from_psycopg)

    def failed_inside(self) -> Exception:
        return psycopg.errors.InFailedSqlTransaction(FAILED_INSIDE)

    def drop(self) -> None:
        # Not close(): a pool may have made "give it back" of that.
        self.connection.pgconn.finish()


class _Executor(_AnyExecutor):
    async def begin(self, sql: str) -> str | None:
        # Else psycopg would send a BEGIN of its own, and whether it has can't be seen.
        if not self.connection.autocommit:
            self.connection.autocommit = True
        return await self.end(sql)

    async def end(self, sql: str, limit: float | None = None) -> str | None:  # noqa: ARG002 - see below
        # How long it may take, nothing here limits: TCP ends it when the server is gone (for our own connections
        # after STATEMENT_SECONDS, by tcp_user_timeout), and the server ends it when its operator says so.
        # Not the connection's own cursor: which kind that is, the application has said.
        cursor = psycopg.Cursor(self.connection).execute(sql.encode(), prepare=False)
        while cursor.nextset():
            pass
        return cursor.statusmessage

    async def fetch(self, sql: str, parameters: Sequence[Any]) -> Sequence[Sequence[Any]]:
        cursor = psycopg.RawCursor(self.connection, row_factory=tuple_row)
        cursor.execute(sql.encode(), parameters, binary=True)
        return cursor.fetchall() if cursor.description else []

    def let_go(self) -> None:
        connection, is_idle = self.connection, self.status is Status.IDLE
        if is_idle:
            if connection.autocommit != self._was_autocommit:
                connection.autocommit = self._was_autocommit
            connection.row_factory, connection.cursor_factory = self._factories
        else:
            self.drop()
        if self.session is not None:
            self._pool.give_back(connection if is_idle else None)
            return
        with suppress(psycopg.Error, ValueError):  # a pool that is closed closes it; one that is gone can't
            self._pool.putconn(connection)


class _AsyncExecutor(_AnyExecutor):
    async def begin(self, sql: str) -> str | None:
        if not self.connection.autocommit:
            await self.connection.set_autocommit(True)
        return await self.end(sql)

    async def end(self, sql: str, limit: float | None = None) -> str | None:
        giving_up = limit and asyncio.get_running_loop().call_later(limit, hang_up, self.connection)
        try:
            cursor = await psycopg.AsyncCursor(self.connection).execute(sql.encode(), prepare=False)
        finally:
            if giving_up:
                giving_up.cancel()
        while cursor.nextset():
            pass
        return cursor.statusmessage

    async def fetch(self, sql: str, parameters: Sequence[Any]) -> Sequence[Sequence[Any]]:
        cursor = psycopg.AsyncRawCursor(self.connection, row_factory=tuple_row)
        await cursor.execute(sql.encode(), parameters, binary=True)
        return await cursor.fetchall() if cursor.description else []

    async def let_go(self) -> None:
        await asyncio.shield(self._given_back())

    async def _given_back(self) -> None:
        if self.status is Status.IDLE:
            await self.connection.set_autocommit(self._was_autocommit)
            self.connection.row_factory, self.connection.cursor_factory = self._factories
        else:
            self.drop()
        with suppress(psycopg.Error, ValueError):
            await self._pool.putconn(self.connection)


def _pool_url(pool: ConnectionPool[Any] | AsyncConnectionPool[Any]) -> str:
    """Name where *pool* connects to, as far as it says so beforehand."""
    if not hasattr(pool, "_configure"):  # see _made_by
        raise unknown_address("this pool")
    conninfo = "" if callable(pool.conninfo) else pool.conninfo or ""
    kwargs = {} if callable(pool.kwargs) else pool.kwargs or {}
    try:
        return postgres_url(conninfo_to_dict(conninfo, **{each: kwargs[each] for each in _PARTS if each in kwargs}))
    except psycopg.ProgrammingError:
        # The driver's own words may quote the password, so they go no further.
        raise unknown_address("this pool") from None


def _made_by(pool: ConnectionPool[Any]) -> psycopg.Connection[Any]:
    """Make a connection as *pool* does, and keep it out of there."""
    conninfo = pool.conninfo() if callable(pool.conninfo) else pool.conninfo or ""
    kwargs = pool.kwargs() if callable(pool.kwargs) else pool.kwargs or {}
    connection: psycopg.Connection[Any] = pool.connection_class.connect(conninfo, **kwargs)
    # The pool has no other name for it. It may say which schema is searched.
    if configure := pool._configure:  # noqa: SLF001 - see above
        try:
            configure(connection)
        except BaseException:
            connection.close()
            raise
    return connection


async def _async_made_by(pool: AsyncConnectionPool[Any]) -> psycopg.AsyncConnection[Any]:
    """As ``_made_by``."""
    conninfo, kwargs = await _value(pool.conninfo) or "", await _value(pool.kwargs) or {}
    connection: psycopg.AsyncConnection[Any] = await pool.connection_class.connect(conninfo, **kwargs)
    if configure := pool._configure:  # noqa: SLF001 - as above
        try:
            await configure(connection)
        except BaseException:
            await connection.close()
            raise
    return connection


async def _value(given: Any) -> Any:
    made = given() if callable(given) else given
    return await made if isawaitable(made) else made
