"""Transactions on psycopg under an event loop, from a pool of the application's. Sync ones are in ``psycopg.py``."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from inspect import isawaitable
from typing import Any, Self, TypeVar

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row
from psycopg_pool import AsyncConnectionPool, PoolTimeout

from semel.core.commands import Begin, Open
from semel.errors import StoreError
from semel.stores.connections.endings import (
    COMMIT_SECONDS,
    HAS_LOCK,
    ROLLBACK_SECONDS,
    WAIT_SECONDS,
    Notices,
    all_in_use,
    of_commit,
    unknown,
)
from semel.stores.connections.psycopg import (
    IN_TRANSACTION,
    MORE_OF_THEIRS,
    SESSION,
    begin_sql,
    check_before_commit,
    check_open,
    check_tag,
    pool_url,
    raise_known,
)
from semel.stores.postgres.address import Address
from semel.stores.postgres.async_opening import as_given
from semel.stores.postgres.errors import unreachable
from semel.stores.statement import Joined
from semel.stores.transaction import AsyncConnections, AsyncUnit

T = TypeVar("T")


class AsyncPsycopgConnections(AsyncConnections):
    """Transactions on an event loop, on psycopg. The pool is the application's."""

    def __init__(self, address: Address, pool: AsyncConnectionPool[Any]) -> None:
        """Take from *pool*, which the application opens and closes."""
        self._address = address
        self.opener = address.opener
        self._pool = pool

    @classmethod
    def of(cls, pool: AsyncConnectionPool[Any], url: str | None = None) -> Self:
        """Take connections from a pool of the application's. Without *url*, the store's own are made as the pool's."""
        return cls(Address.of(url or cls.url_of(pool), None if url else partial(_made_by, pool)), pool)

    @staticmethod
    def url_of(pool: AsyncConnectionPool[Any]) -> str:
        """Return where *pool* connects to."""
        return pool_url(pool)

    async def begin(self, command: Begin | Open, opening: str | None = None) -> AsyncUnit:  # noqa: ARG002 - the same for both
        """Begin a transaction, *opening* with it."""
        for is_last in (False, True):
            unit = _AsyncUnit(await self._connection(), self._pool, self._address)
            try:
                await unit.begin(opening)
            except StoreError:
                was_broken = unit.connection.closed
                await unit.rollback()
                if is_last or not was_broken:
                    raise
                await self._pool.check()
            except BaseException:
                await unit.rollback()
                raise
            else:
                return unit
        raise AssertionError  # pragma: no cover - the last round returned or raised

    async def _connection(self) -> psycopg.AsyncConnection[Any]:
        try:
            connection: psycopg.AsyncConnection[Any] = await self._pool.getconn(timeout=WAIT_SECONDS)
            return connection
        except PoolTimeout as error:
            await self._probe()  # a pool that can't connect has nothing to give either, and says the same
            raise all_in_use(self._address, self._pool.max_size, MORE_OF_THEIRS) from error
        except psycopg.Error as error:
            raise unreachable(error, self._address) from error

    async def _probe(self) -> None:
        try:
            if self._address.opener is None:
                await (await psycopg.AsyncConnection.connect(self._address.url, **SESSION)).close()
            else:
                await (await as_given(self._address)).close()
        except (psycopg.Error, OSError) as error:
            raise unreachable(error, self._address) from error

    async def close(self) -> None:
        """Leave the pool alone: it is the application's."""


class _AsyncUnit(AsyncUnit):
    connection: psycopg.AsyncConnection[Any]

    def __init__(
        self, connection: psycopg.AsyncConnection[Any], pool: AsyncConnectionPool[Any], address: Address
    ) -> None:
        self.connection = connection
        self._pool = pool
        self._address = address
        self._was_autocommit = connection.autocommit

    async def begin(self, opening: str | None) -> None:
        try:
            await self.connection.set_autocommit(True)
            self.has_lock = await self._execute(begin_sql(self.connection, opening, is_ours=False)) == HAS_LOCK
        except psycopg.Error as error:
            raise_known(error, self._address)
            raise

    async def run(self, joined: Joined[T]) -> T:
        check_open(self.connection)
        try:
            cursor = psycopg.AsyncRawCursor(self.connection, row_factory=tuple_row)
            await cursor.execute(joined.query.numbered.encode(), joined.in_order, binary=True)
            rows = await cursor.fetchall() if cursor.description else []
        except psycopg.Error as error:
            raise_known(error, self._address)
            raise
        except BaseException:
            self._drop()
            raise
        return joined.read(rows)

    async def commit(self) -> None:
        notices = Notices()
        try:
            check_before_commit(self.connection, self._address)
            self.connection.add_notice_handler(notices.from_psycopg)
            async with asyncio.timeout(COMMIT_SECONDS):
                tag = await self._execute("COMMIT")
            self.connection.remove_notice_handler(notices.from_psycopg)
        except psycopg.Error as error:
            known = of_commit(error, error.sqlstate, self._address, is_lost=self.connection.closed)
            if known is None:
                self.connection.remove_notice_handler(notices.from_psycopg)
                raise
            self._drop()
            raise known from error
        except TimeoutError as error:
            self._drop()
            raise unknown(self._address, error) from error
        except BaseException:
            self._drop()
            raise
        finally:
            await asyncio.shield(self._let_go())
        check_tag(tag)
        notices.check(self._address)

    async def rollback(self) -> None:
        await asyncio.shield(self._rollback())

    async def _rollback(self) -> None:
        try:
            if self.connection.info.transaction_status in IN_TRANSACTION:
                async with asyncio.timeout(ROLLBACK_SECONDS):
                    await self._execute("ROLLBACK")
        except (psycopg.Error, TimeoutError):
            self._drop()
        finally:
            await self._let_go()

    async def _execute(self, sql: str) -> str | None:
        cursor = await psycopg.AsyncCursor(self.connection).execute(sql.encode(), prepare=False)
        while cursor.nextset():
            pass
        return cursor.statusmessage

    def _drop(self) -> None:
        self.connection.pgconn.finish()

    async def _let_go(self) -> None:
        if self.connection.info.transaction_status == TransactionStatus.IDLE:
            await self.connection.set_autocommit(self._was_autocommit)
        else:
            self._drop()
        with suppress(psycopg.Error, ValueError):
            await self._pool.putconn(self.connection)


async def _made_by(pool: AsyncConnectionPool[Any]) -> psycopg.AsyncConnection[Any]:
    """Make a connection as *pool* does, and keep it out of there."""
    conninfo, kwargs = await _value(pool.conninfo) or "", await _value(pool.kwargs) or {}
    connection: psycopg.AsyncConnection[Any] = await pool.connection_class.connect(conninfo, **kwargs)
    # The pool has no other name for it. It may say which schema is searched.
    if configure := pool._configure:  # noqa: SLF001 - see above
        try:
            await configure(connection)
        except BaseException:
            await connection.close()
            raise
    return connection


async def _value(given: Any) -> Any:
    made = given() if callable(given) else given
    return await made if isawaitable(made) else made
