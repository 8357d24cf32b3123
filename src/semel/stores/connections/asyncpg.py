"""Transactions on asyncpg: from a pool of the store's own, or from the application's. How they begin and end is in
``postgres.py``, which statements join them is the stores' affair.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any, Self
from urllib.parse import unquote, urlsplit

from semel.errors import ConfigurationError
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
from semel.stores.connections.pool import AllInUse, AsyncPool
from semel.stores.connections.postgres import AsyncPostgresConnections, Session, Status
from semel.stores.connections.urls import postgres_url, unknown_address
from semel.stores.forks import leave_alone, start_afresh_in_children
from semel.stores.postgres.address import CONNECT_SECONDS, Address
from semel.stores.postgres.durability import is_off_async
from semel.stores.postgres.encoding import ENCODING
from semel.stores.postgres.errors import unreachable
from semel.stores.postgres.network import STATEMENTS, tell_kernel
from semel.stores.postgres.pooler import is_direct_async

try:
    import asyncpg
    from asyncpg.pool import PoolConnectionProxy
    from asyncpg.transaction import TransactionState
except ImportError as error:  # pragma: no cover - seen only where the extra is missing
    raise ImportError("PostgreSQL under an event loop needs asyncpg. Run: pip install 'semel[postgres]'") from error

#: The last is what the driver says in the moment between the server's last word and the end of the connection.
_FAULTS = (asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError, asyncpg.InternalClientError)

#: What ``asyncpg.connect`` calls the parts of an address, and libpq.
_PARTS = {"host": "host", "port": "port", "user": "user", "database": "dbname"}

#: How a pool makes its connections. asyncpg keeps it for itself.
_HOW = ("_connect_args", "_connect_kwargs", "_connect", "_connection_class", "_record_class", "_init", "_setup")


class _Connection(asyncpg.Connection):
    """One of our own."""

    session: Session
    #: What each transaction looks like to the driver: a block of the handler's, made by ``transaction()``, has to find
    #: this one around it. Its own BEGIN would take a round trip.
    block: Any
    #: Who hears what the server says beside, unless a handler wants to hear it too.
    listeners: frozenset[Any]

    @classmethod
    async def opened(cls, url: str) -> Self:
        """Connect; through a pooler, without the prepared statements that asyncpg makes of everything."""
        named: dict[str, Any] = {
            "connection_class": cls,
            "timeout": CONNECT_SECONDS,
            "server_settings": {"application_name": APPLICATION_NAME, "client_encoding": ENCODING},
        }
        made: Any = await asyncpg.connect(url, **named)
        is_direct = await is_direct_async(made)
        if not is_direct:
            await made.close(timeout=CONNECT_SECONDS)
            made = await asyncpg.connect(url, **named, statement_cache_size=0)
        tell_kernel(made._transport.get_extra_info("socket").fileno(), STATEMENTS)  # noqa: SLF001 - asyncpg tells it nothing
        made.session = Session(is_direct=is_direct, is_off=await is_off_async(made))
        made.block = asyncpg.transaction.Transaction(made, "read_committed", readonly=False, deferrable=True)
        made.block._state = TransactionState.STARTED  # noqa: SLF001 - as start() does
        made.add_log_listener(made.session.notices.from_asyncpg)
        made.listeners = frozenset(made._log_listeners)  # noqa: SLF001 - it takes some time to add one
        opened: Self = made
        return opened


class AsyncpgConnections(AsyncPostgresConnections):
    """Transactions on an event loop, on asyncpg."""

    def __init__(self, address: Address, pool: asyncpg.Pool[Any] | None = None) -> None:
        """Open a pool of its own on first use; or take from *pool*, which the application opens and closes."""
        super().__init__(address)
        self._given = pool
        self._own: AsyncPool[_Connection] | None = None
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

    async def take(self) -> _Executor:
        """Return a connection of the pool's."""
        if self._given is not None:
            return _Executor(await self._acquired(self._given), self._given)
        pool = self._own
        if pool is None or pool.loop is not asyncio.get_running_loop():
            pool = self._opened()
        try:
            connection = await pool.take(WAIT_SECONDS)
            while connection.is_closed():  # known of some; of the others, BEGIN tells
                pool.give_back(None)
                connection = await pool.take(WAIT_SECONDS)
        except AllInUse:
            raise all_in_use(self.address, pool.size, MORE) from None
        except _FAULTS as error:
            raise unreachable(error, self.address) from error
        except ValueError:
            # The driver's own words may quote the password, so they go no further.
            message = f"{self.address} can't be read as the address of a PostgreSQL server."
            raise ConfigurationError(message) from None
        return _Executor(PoolConnectionProxy(_HOLDER, connection), pool, connection.session)

    async def renew(self) -> None:
        """Replace what is idle in the pool."""
        if self._given is not None:
            await self._given.expire_connections()
        else:
            self._opened().idle.drop()

    async def close(self) -> None:
        """Close the pool, if it is the store's own."""
        pool, self._own = self._own, None
        if pool is not None and pool.loop is asyncio.get_running_loop():
            while (connection := pool.idle.pop()) is not None:
                with suppress(*_FAULTS):
                    await connection.close(timeout=CONNECT_SECONDS)
        if pool is not None:
            pool.idle.close()

    def start_afresh(self) -> None:
        """Have no pool: its connections are the parent's."""
        leave_alone(self._own)
        self._own = None

    def _opened(self) -> AsyncPool[_Connection]:
        if self._own is not None and self._own.loop is not asyncio.get_running_loop():
            self._own.idle.close()
            self._own = None
        if self._own is None:
            self._own = AsyncPool(self.address.pool, partial(_Connection.opened, self.address.url), _close)
        return self._own

    async def _acquired(self, pool: asyncpg.Pool[Any]) -> Any:
        # Where one is free there is nothing to wait for, and a time limit costs a task of its own.
        limit = None if pool.get_idle_size() else WAIT_SECONDS
        try:
            return await pool.acquire(timeout=limit)
        except TimeoutError as error:
            if pool.get_idle_size() == 0 and pool.get_size() >= pool.get_max_size():
                raise all_in_use(self.address, pool.get_max_size(), MORE_OF_THEIRS) from error
            raise unreachable(error, self.address) from error
        except _FAULTS as error:
            raise unreachable(error, self.address) from error


#: What asyncpg's wrapper asks of the pool that it belongs to: ours has nothing to clear for all of its connections.
_HOLDER: Any = SimpleNamespace(
    _pool=SimpleNamespace(_drop_statement_cache=lambda: None, _drop_type_cache=lambda: None),
)


class _Executor:
    faults: tuple[type[Exception], ...] = _FAULTS

    def __init__(self, connection: Any, pool: Any, session: Session | None = None) -> None:
        #: A wrapper that can't be used after it was given back: right for an application, and felt where a dozen calls
        #: go through it.
        self.connection = connection
        self.session = session
        self._inner = connection._con  # noqa: SLF001 - see above
        self._pool = pool

    @property
    def status(self) -> Status:
        try:
            if self._inner.is_closed():
                return Status.LOST
        except asyncpg.InterfaceError:  # one that was lost is taken back by its pool, and can't be asked any more
            return Status.LOST
        return Status.OPEN if self._inner.is_in_transaction() else Status.IDLE

    def begin_sql(self) -> str:
        # Servers before 14 don't say it.
        is_read_only = getattr(self._inner.get_settings(), "default_transaction_read_only", "off") == "on"
        return "BEGIN" if is_read_only else "BEGIN DEFERRABLE"

    def begin(self, sql: str) -> Awaitable[str]:
        inner = self._inner
        if self.session is None:
            # As start() does, but its BEGIN takes a round trip of its own.
            block = self.connection.transaction()
            block._state = TransactionState.STARTED  # noqa: SLF001 - as start() does
        else:
            block = inner.block
        inner._top_xact = block  # noqa: SLF001 - as start() does
        sent: Awaitable[str] = inner.execute(sql)
        return sent

    async def end(self, sql: str, limit: float) -> str:
        inner = self._inner
        inner._top_xact = None  # noqa: SLF001 - as commit() and rollback() do before they send
        giving_up = asyncio.get_running_loop().call_later(limit, hang_up, inner)
        try:
            sent: str = await inner.execute(sql)
            return sent
        finally:
            giving_up.cancel()

    def fetch(self, sql: str, parameters: Sequence[Any]) -> Awaitable[Sequence[Sequence[Any]]]:
        fetched: Awaitable[Sequence[Sequence[Any]]] = self._inner.fetch(sql, *parameters)
        return fetched

    def hear(self, notices: Notices, *, listens: bool) -> None:
        change = self._inner.add_log_listener if listens else self._inner.remove_log_listener
        change(notices.from_asyncpg)

    def failed_inside(self) -> Exception:
        return asyncpg.InFailedSQLTransactionError(FAILED_INSIDE)

    def drop(self) -> None:
        with suppress(*_FAULTS):
            self._inner.terminate()

    def let_go(self) -> Awaitable[None] | None:
        connection = self._inner
        if self.session is None:
            return self._released()
        self.connection._detach()  # noqa: SLF001 - as asyncpg's own pool does
        connection._top_xact = None  # noqa: SLF001 - as above, where the handler has ended the transaction by itself
        if not (
            connection.is_closed() or connection.is_in_transaction() or connection._protocol._is_cancelling()  # noqa: SLF001 - asyncpg's own pool asks it the same
        ):
            connection._log_listeners -= connection.listeners  # noqa: SLF001 - what is left is told as a handler's
            connection._on_release()  # noqa: SLF001 - as above: what the handler has kept of it is of no use any more
            connection._listeners.clear()  # noqa: SLF001 - as above
            connection._log_listeners = set(connection.listeners)  # noqa: SLF001 - as above
            self._pool.give_back(connection)
        else:
            _close(connection)
            self._pool.give_back(None)
        return None

    async def _released(self) -> None:
        # It is given back whether or not we are cancelled meanwhile: asyncpg sees to that. What goes wrong with a
        # reset of the application's own closes the connection, and is none of the transaction's.
        with suppress(*_FAULTS):
            self._inner._top_xact = None  # noqa: SLF001 - as above
            await self._pool.release(self.connection)


def _close(connection: asyncpg.Connection[Any]) -> None:
    with suppress(RuntimeError, *_FAULTS):  # the loop that it was opened on may be closed
        connection.terminate()


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
