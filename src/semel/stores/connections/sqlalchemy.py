"""Transactions on SQLAlchemy: from an engine, or from a sessionmaker. The sync way is the only way; the async one walks
it in SQLAlchemy's own greenlet.

A handler may call ``session.commit()`` and ``session.rollback()`` as it always did: its session works in a savepoint,
and the transaction around it is ended here. How long to wait for a connection while all are in use is the engine's
``pool_timeout``, and how long a statement or a sync COMMIT may take its driver's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Self, TypeVar, cast

from semel.core.commands import Begin, Open
from semel.core.record import Found
from semel.errors import CommitUnknown, ConfigurationError, StoreUnavailable
from semel.stores.connections.endings import COMMIT_SECONDS, ROLLBACK_SECONDS, ended_inside, hang_up
from semel.stores.statement import Joined
from semel.stores.transaction import AsyncConnections, AsyncUnit, Connections, Unit

try:
    from sqlalchemy import Connection, Engine, text
    from sqlalchemy.exc import DBAPIError, SQLAlchemyError
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, async_sessionmaker
    from sqlalchemy.orm import Session, sessionmaker
    from sqlalchemy.util import greenlet_spawn
except ImportError as error:  # pragma: no cover - seen only where the extra is missing
    raise ImportError("An engine needs SQLAlchemy 2. Run: pip install 'semel[sqlalchemy]'") from error

from semel.stores.connections.beside import Watch
from semel.stores.connections.dialects import Dialect, dialect_of, made_by, no_connection, url_of_engine

T = TypeVar("T")

#: A session's own COMMIT and ROLLBACK end its savepoint, and never the transaction around it.
_IN_A_SAVEPOINT: Any = {"join_transaction_mode": "create_savepoint"}


class SQLAlchemyConnections(Connections):
    """Transactions for threads. For an engine the connection is a ``Connection``, for a sessionmaker a ``Session``."""

    def __init__(self, given: Engine | sessionmaker[Any], url: str | None = None) -> None:
        """Take connections from what the application has. Without *url*, the store's own are made as it makes them."""
        self._sessions = None if isinstance(given, Engine) else given
        self._engine = _engine(given)
        self._dialect = dialect_of(self._engine, url)
        self._watch = Watch(self._engine)
        self.opener = None if url else partial(made_by, self._engine)

    @classmethod
    def of(cls, given: Engine | sessionmaker[Any], url: str | None = None) -> Self:
        """Take connections from an engine or a sessionmaker of the application's."""
        return cls(given, url)

    @staticmethod
    def url_of(given: Engine | sessionmaker[Any]) -> str:
        """Return where it connects to."""
        return url_of_engine(_engine(given))

    def begin(self, command: Begin | Open, opening: Any = None) -> Unit | Found:  # noqa: ARG002 - the driver begins
        """Begin a transaction, unless what is there makes it needless."""
        if (rival := self._dialect.start(command)) is not None:
            return self._dialect.peek(command) or rival
        try:
            begun = (self._dialect.peek(command) if self._dialect.peeks else None) or self._begin(command)
        except BaseException:
            self._dialect.stop(command)
            raise
        if isinstance(begun, Found):
            self._dialect.stop(command)
        return begun

    def close(self) -> None:
        """Close what is not the engine's."""
        self._dialect.close()

    def _begin(self, command: Begin | Open) -> Unit:
        self._watch.before()
        try:
            connection = self._engine.connect()
        except SQLAlchemyError as error:
            raise no_connection(error, self._engine, self._dialect) from error
        unit = _Unit(connection, self._dialect)
        try:
            unit.begin(command)
            if self._sessions is not None:
                unit.join(self._sessions(bind=connection, **_IN_A_SAVEPOINT))
        except BaseException:
            unit.rollback()
            raise
        unit.command = command
        self._watch.lend(connection)
        return unit


class _Unit(Unit):
    connection: Connection | Session

    def __init__(self, connection: Connection, dialect: Dialect) -> None:
        self.connection = connection
        self._connection = connection
        self._session: Session | None = None
        self._dialect = dialect
        # Where it is a file, the transaction begins with the write lock.
        self.has_lock = dialect.peeks
        #: What this process has set down as being under way here.
        self.command: Begin | Open | None = None

    def begin(self, command: Begin | Open) -> None:
        try:
            self._transaction = self._connection.begin()
            self._dialect.begin(self._connection, command)
        except DBAPIError as error:
            self._raise_known(error)
            raise

    def join(self, session: Session) -> None:
        """Lend a session rather than the connection below it."""
        self.connection = self._session = session

    def run(self, joined: Joined[T]) -> T:
        self._check_open()
        self._flush()
        try:
            rows = self._rows(joined)
            if rows and joined.also is not None:
                self._rows(joined.also)
        except DBAPIError as error:
            self._raise_known(error)
            raise
        except BaseException:
            self._drop()
            raise
        return joined.read(rows)

    def _rows(self, joined: Joined[Any]) -> Sequence[Any]:
        result = self._connection.execute(text(joined.query.text), dict(joined.parameters))
        return result.all() if result.returns_rows else []

    def commit(self) -> None:
        try:
            self._check_open()
            if self._session is not None and self._session.in_transaction():
                # Ends its savepoint. If the session's last flush has failed, it says so here.
                self._session.commit()
            said = self._dialect.commit(self._connection, self._transaction.commit)
        except DBAPIError as error:
            known = self._dialect.of_commit(error)
            if known is None:
                raise
            self._drop()
            raise known from error
        except BaseException:
            self._drop()
            raise
        finally:
            self._let_go()
        self._dialect.check(said)

    def rollback(self) -> None:
        try:
            if self._session is not None:
                self._session.close()
            if self._connection.in_transaction():
                self._connection.rollback()
        except Exception:  # noqa: BLE001 - whatever it was, closing the connection does the same
            self._drop()
        except BaseException:
            self._drop()
            raise
        finally:
            self._let_go()

    def _flush(self) -> None:
        """Write what the session has not written yet. What goes wrong there is the handler's own."""
        try:
            if self._session is not None:
                self._session.flush()
        except BaseException as error:
            if not isinstance(error, Exception):
                self._drop()
            raise

    def _check_open(self) -> None:
        if self._connection.invalidated:
            raise StoreUnavailable("The connection was lost inside the handler; nothing was written.")
        if self._connection.get_transaction() is not self._transaction or not self._transaction.is_active:
            raise ended_inside()

    def _raise_known(self, error: DBAPIError) -> None:
        known = self._dialect.of_statement(error)
        if known is not None:
            raise known from error

    def _drop(self) -> None:
        with suppress(Exception):
            self._connection.invalidate()

    def _let_go(self) -> None:
        with suppress(Exception):
            if self._session is not None:
                self._session.close()
        with suppress(Exception):
            self._connection.close()
        command, self.command = self.command, None
        if command is not None:
            self._dialect.stop(command)


class AsyncSQLAlchemyConnections(AsyncConnections):
    """Transactions on an event loop. The connection is an ``AsyncConnection`` or an ``AsyncSession``."""

    def __init__(self, given: AsyncEngine | async_sessionmaker[Any], url: str | None = None) -> None:
        """Take connections from what the application has. Without *url*, the store's own are made as it makes them."""
        self._sessions = None if isinstance(given, AsyncEngine) else given
        self._engine = _async_engine(given)
        self._dialect = dialect_of(self._engine.sync_engine, url)
        self._watch = Watch(self._engine.sync_engine)
        self.opener = None if url else partial(greenlet_spawn, made_by, self._engine.sync_engine)

    @classmethod
    def of(cls, given: AsyncEngine | async_sessionmaker[Any], url: str | None = None) -> Self:
        """Take connections from an engine or a sessionmaker of the application's."""
        return cls(given, url)

    @staticmethod
    def url_of(given: AsyncEngine | async_sessionmaker[Any]) -> str:
        """Return where it connects to."""
        return url_of_engine(_async_engine(given).sync_engine)

    async def begin(self, command: Begin | Open, opening: Any = None) -> AsyncUnit | Found:  # noqa: ARG002 - as above
        """Begin a transaction, unless what is there makes it needless."""
        if (rival := self._dialect.start(command)) is not None:
            return await asyncio.to_thread(self._dialect.peek, command) or rival
        try:
            found = await asyncio.to_thread(self._dialect.peek, command) if self._dialect.peeks else None
            begun = found or await self._begin(command)
        except BaseException:
            self._dialect.stop(command)
            raise
        if isinstance(begun, Found):
            self._dialect.stop(command)
        return begun

    async def close(self) -> None:
        """Close what is not the engine's."""
        self._dialect.close()

    async def _begin(self, command: Begin | Open) -> AsyncUnit:
        self._watch.before()
        try:
            connection = await self._engine.connect()
        except (SQLAlchemyError, OSError) as error:
            raise no_connection(error, self._engine.sync_engine, self._dialect) from error
        unit = _AsyncUnit(connection, self._dialect)
        try:
            await unit.begin(command)
            if self._sessions is not None:
                unit.join(self._sessions(bind=connection, **_IN_A_SAVEPOINT))
        except BaseException:
            await unit.rollback()
            raise
        unit.unit.command = command
        self._watch.lend(cast("Connection", connection.sync_connection))
        return unit


class _AsyncUnit(AsyncUnit):
    def __init__(self, connection: AsyncConnection, dialect: Dialect) -> None:
        self.connection: Any = connection
        self._connection = connection
        self.unit = _Unit(cast("Connection", connection.sync_connection), dialect)  # there once it was awaited
        self.has_lock = self.unit.has_lock

    async def begin(self, command: Begin | Open) -> None:
        await self._in_greenlet(lambda: self.unit.begin(command))

    def join(self, session: Any) -> None:
        self.connection = session
        self.unit.join(session.sync_session)

    async def run(self, joined: Joined[T]) -> T:
        answer: T = await self._in_greenlet(lambda: self.unit.run(joined))
        return answer

    async def commit(self) -> None:
        is_given_up = False

        def give_up() -> None:
            nonlocal is_given_up
            is_given_up = True
            hang_up(driver)

        driver = (await self._connection.get_raw_connection()).driver_connection
        giving_up = asyncio.get_running_loop().call_later(COMMIT_SECONDS, give_up)
        try:
            await self._in_greenlet(self.unit.commit)
        except Exception as error:
            if not is_given_up:
                raise
            raise CommitUnknown(f"COMMIT was not answered within {COMMIT_SECONDS} s.") from error
        finally:
            giving_up.cancel()

    async def rollback(self) -> None:
        await asyncio.shield(self._rollback())

    async def _rollback(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(ROLLBACK_SECONDS):
                await self._in_greenlet(self.unit.rollback)

    async def _in_greenlet(self, do: Any) -> Any:
        return await self._connection.run_sync(lambda _: do())


def _engine(given: Engine | sessionmaker[Any]) -> Engine:
    engine = given if isinstance(given, Engine) else given.kw.get("bind")
    if not isinstance(engine, Engine):
        raise ConfigurationError("This sessionmaker is bound to no engine: sessionmaker(engine) is needed.")
    return engine


def _async_engine(given: AsyncEngine | async_sessionmaker[Any]) -> AsyncEngine:
    engine = given if isinstance(given, AsyncEngine) else given.kw.get("bind")
    if not isinstance(engine, AsyncEngine):
        raise ConfigurationError("This async_sessionmaker is bound to no engine: async_sessionmaker(engine) is needed.")
    return engine
