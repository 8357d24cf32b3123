"""Transactions on PostgreSQL, over whichever driver: how they begin and end, and what their errors mean. How a driver
sends something, and where its connections come from, the drivers' own files say.

It is written once, as coroutines over an ``Executor``; see ``stores/transaction.py`` for how a thread runs them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Coroutine, Sequence
from enum import Enum, auto
from typing import Any, Protocol, TypeVar

from semel.core.commands import Begin, Open
from semel.errors import StoreError, StoreReadOnly, StoreUnavailable
from semel.stores.connections.endings import (
    CLEAR,
    COMMIT_SECONDS,
    RESET,
    ROLLBACK_SECONDS,
    Notices,
    commit_sql,
    ended_inside,
    is_end,
    is_fence,
    lost,
    of_commit,
    of_statement,
)
from semel.stores.connections.script import Prepared, is_short, plain
from semel.stores.postgres.address import Address
from semel.stores.postgres.durability import FOR_TRANSACTION
from semel.stores.postgres.encoding import check_encoding
from semel.stores.postgres.joined import NOTE_TABLE
from semel.stores.statement import Joined
from semel.stores.transaction import AsyncConnections, AsyncUnit, Connections, Fenced, Unit, at_once

T = TypeVar("T")

#: There is no prepared statement of that name.
_NOT_PREPARED = "26000"

#: How a transaction of our own begins. DEFERRABLE changes nothing here: it is the mark by which the last statement
#: knows that this is the transaction which was begun, and not one that a handler has begun after ending it.
_BEGIN = "BEGIN ISOLATION LEVEL READ COMMITTED, DEFERRABLE"


class Status(Enum):
    """What a connection is in, as far as its client knows."""

    #: No transaction.
    IDLE = auto()
    OPEN = auto()
    #: A transaction in which a statement has failed.
    FAILED = auto()
    #: There is no connection any more, or it is not known what comes back on it.
    LOST = auto()


class Session:
    """What is known of a connection of the store's own."""

    def __init__(self, *, is_direct: bool, is_off: bool) -> None:
        """*is_direct*: it is to the server itself, and not to a pooler. *is_off*: its COMMIT is answered too early."""
        self.is_direct = is_direct
        #: Whether it was seen to carry every character.
        self.is_checked = False
        self.begin_sql = "; ".join(filter(None, (RESET, _BEGIN, FOR_TRANSACTION if is_off else None)))
        self.commit_sql = commit_sql(is_direct=is_direct, is_off=is_off)
        self.prepared = Prepared()
        #: How statements become one text: on a connection of our own they stay prepared, unless a pooler is there.
        self.text = self.prepared.script if is_direct else _text
        #: What the server says beside its replies. The driver tells it, for as long as the session lasts.
        self.notices = Notices()


class Executor(Protocol):
    """One connection of a driver's, for one transaction. What it returns to be awaited, a thread has at once."""

    #: What is lent, in the driver's own type.
    connection: Any
    #: None: it is the application's.
    session: Session | None
    #: What the driver raises.
    faults: tuple[type[Exception], ...]

    @property
    def status(self) -> Status:
        """What it is in. FAILED may be told as OPEN by a driver that does not know."""

    def begin_sql(self) -> str:
        """Return how to begin on a connection of the application's: in the isolation that it has asked for, and
        read-only if it has asked for that. Never READ WRITE: that would force a server which was made read-only on
        purpose. DEFERRABLE, as ours, unless it is read-only, where that may wait.
        """

    def begin(self, sql: str) -> Awaitable[str | None]:
        """Have the driver take the transaction for one of its own, and send what begins it; as ``end``."""

    def end(self, sql: str, limit: float) -> Awaitable[str | None]:
        """Have the driver forget the transaction, and send what ends it: statements without parameters, in one round
        trip. Return the last one's command tag. *limit* is in seconds, where there is anything to limit it with.
        """

    def fetch(self, sql: str, parameters: Sequence[Any]) -> Awaitable[Sequence[Sequence[Any]]]:
        """Run one statement."""

    def hear(self, notices: Notices, *, listens: bool) -> None:
        """Begin or stop to tell *notices* what the server says beside, on a connection of the application's."""

    def failed_inside(self) -> Exception:
        """Return what the driver raises in a transaction that has failed."""

    def drop(self) -> None:
        """Close the connection at once."""

    def let_go(self) -> Awaitable[None] | None:
        """Give it back as it was, or close it, if it is in a transaction still. Never raises. None: that is done."""


class Kernel:
    """One transaction on one executor."""

    def __init__(self, executor: Executor, address: Address) -> None:
        """Nothing is begun yet."""
        self.executor = executor
        self.connection = executor.connection
        self._address = address
        self.has_lock = self.is_clear = False
        session = executor.session
        # Through a pooler, what is deferred is run before COMMIT: an error of that and one of ours look the same.
        self.pipelines = session is None or session.is_direct
        self._text = _text if session is None else session.text

    async def begin(self, opening: Sequence[Joined[Any]] | None) -> None:
        """Begin, and look whether the handler can be run, in one round trip."""
        executor, session = self.executor, self.executor.session
        if session is None or not session.is_checked:
            # Of the application's each time: what is lent by a pool need not be alike.
            check_encoding(executor.connection, self._address)
        if session is not None:
            session.is_checked = True
        sql = executor.begin_sql() if session is None else session.begin_sql
        try:
            if opening is not None:
                sql = f"{sql}; {self._text(opening)}"
            else:
                sql = f"{sql}; {self._address.names.put_into(NOTE_TABLE)}"
            tag = await executor.begin(sql)
        except executor.faults as error:
            self._raise_known(error)
            raise
        if session is not None and session.prepared.is_unsure:
            session.prepared.note_sent()
        self.has_lock = self.is_clear = opening is not None and tag == CLEAR

    async def run(self, joined: Joined[T]) -> T:
        """Run one statement in the transaction."""
        executor = self.executor
        if executor.status is Status.IDLE:
            raise ended_inside()
        try:
            query = joined.marked or joined.query
            rows = await executor.fetch(query.numbered, list(map(joined.parameters.__getitem__, query.parameters)))
        except executor.faults as error:
            self._raise_known(error)
            raise
        except BaseException:
            executor.drop()
            raise
        try:
            return joined.read(rows)
        except StoreReadOnly:
            if executor.session is not None:
                # The last handler may have made its session so, which the RESET of a transaction that is begun
                # already can't undo; or it was the primary once. A new connection is neither.
                executor.drop()
            raise

    def commit_with(self, last: Joined[Any]) -> Coroutine[Any, Any, None]:
        """Run *last* and commit, in one round trip; or else roll back."""
        return self.commit(last) if is_short(last) else self._run_and_commit(last)

    async def _run_and_commit(self, last: Joined[Any]) -> None:
        try:
            await self.run(last)
        except BaseException:
            await self.rollback()
            raise
        await self.commit()

    async def commit(self, last: Joined[Any] | None = None) -> None:
        """Commit, with a statement before that."""
        executor, session = self.executor, self.executor.session
        status = executor.status
        if status not in _IN_TRANSACTION:
            await self._end()
            raise ended_inside() if status is Status.IDLE else lost(self._address)
        notices = Notices() if session is None else session.notices
        notices.is_not_replicated = False
        try:
            sql = "COMMIT" if session is None else session.commit_sql
            if last is not None:
                sql = f"{self._text((last,))}; {sql}"
        except BaseException:
            await self.rollback()
            raise
        try:
            tag = await (self._heard(sql, notices) if session is None else executor.end(sql, COMMIT_SECONDS))
        except executor.faults as error:
            await self._raise_of_ending(error, is_of_commit=last is None)
            raise
        except BaseException:
            executor.drop()
            raise
        else:
            if session is not None and session.prepared.is_unsure:
                session.prepared.note_sent()
        finally:
            await self._end()
        if tag != "COMMIT":
            raise executor.failed_inside()
        if notices.is_not_replicated:
            notices.check(self._address)

    async def _heard(self, sql: str, notices: Notices) -> str | None:
        executor = self.executor
        executor.hear(notices, listens=True)
        try:
            return await executor.end(sql, COMMIT_SECONDS)
        finally:
            executor.hear(notices, listens=False)

    async def rollback(self) -> None:
        """Roll back, and let go of the connection. Cancelled in the middle, it is closed."""
        executor = self.executor
        try:
            if executor.status in _IN_TRANSACTION:
                await executor.end("ROLLBACK", ROLLBACK_SECONDS)
        except executor.faults:
            executor.drop()
        except BaseException:
            executor.drop()
            raise
        finally:
            await self._end()

    async def _end(self) -> None:
        executor = self.executor
        if executor.session is not None and executor.session.prepared.is_unsure:
            executor.drop()
        gone = executor.let_go()
        if gone is not None:
            await gone

    async def _raise_of_ending(self, error: Exception, *, is_of_commit: bool) -> None:
        executor = self.executor
        if not is_of_commit and executor.status in _IN_TRANSACTION:
            # COMMIT ends the transaction even where it is refused. This one goes on, so it was the statement before.
            try:
                await executor.end("ROLLBACK", ROLLBACK_SECONDS)
            except executor.faults:
                executor.drop()
            self._raise_known(error)
            return
        known = of_commit(error, _sqlstate(error), self._address, is_lost=executor.status is Status.LOST)
        if known is not None:
            executor.drop()
            raise known from error
        if executor.status in _IN_TRANSACTION:  # what was deferred has failed before COMMIT
            executor.drop()

    def _raise_known(self, error: Exception) -> None:
        sqlstate = _sqlstate(error)
        if is_end(error, sqlstate):
            raise ended_inside() from error
        if is_fence(error, sqlstate, self._address.names):
            raise Fenced from error
        if sqlstate == _NOT_PREPARED and self.executor.session is not None:
            # A handler has deallocated everything. A new connection knows what it has prepared.
            self.executor.drop()
            raise StoreUnavailable(f"{self._address}: {error}") from error
        known = of_statement(error, sqlstate, self._address)
        if known is not None:
            raise known from error


_IN_TRANSACTION = frozenset({Status.OPEN, Status.FAILED})


def _text(statements: Sequence[Joined[Any]]) -> str:
    return "; ".join(plain(each, is_marked=True) for each in statements)


def _sqlstate(error: BaseException) -> str | None:
    return getattr(error, "sqlstate", None)


class AsyncPostgresUnit(Kernel, AsyncUnit):
    """One open transaction, on an event loop."""


async def begun(
    connections: Any,
    command: Begin | Open,  # noqa: ARG001 - what it is begun for is the same to all
    opening: Sequence[Joined[Any]] | None = None,
) -> AsyncPostgresUnit:
    """Begin a transaction, *opening* with it. Of *connections*, ``take`` gives an executor, and ``renew`` replaces what
    is idle and may be useless.
    """
    for is_last in (False, True):
        unit = AsyncPostgresUnit(await connections.take(), connections.address)
        try:
            await unit.begin(opening)
        except StoreError:
            # The server was restarted, or another is the primary now: what else is idle is as useless.
            was_broken = unit.executor.status is Status.LOST
            await unit.rollback()
            if is_last or not was_broken:
                raise
            await connections.renew()
        except Exception:
            await unit.rollback()
            raise
        except BaseException:
            unit.executor.drop()
            await unit.rollback()
            raise
        else:
            return unit
    raise AssertionError  # pragma: no cover - the last round returned or raised


class PostgresUnit(Unit):
    """One open transaction, for a thread."""

    def __init__(self, kernel: Kernel) -> None:
        """It is begun."""
        self._kernel = kernel
        self.connection = kernel.connection
        self.has_lock = self.is_clear = kernel.is_clear
        self.pipelines = kernel.pipelines

    def run(self, joined: Joined[T]) -> T:
        """Run one statement in the transaction."""
        return at_once(self._kernel.run(joined))

    def commit_with(self, last: Joined[Any]) -> None:
        """Run the last statement and commit."""
        at_once(self._kernel.commit_with(last))

    def commit(self) -> None:
        """Commit."""
        at_once(self._kernel.commit())

    def rollback(self) -> None:
        """Roll back."""
        at_once(self._kernel.rollback())


class PostgresConnections(Connections):
    """Transactions for threads."""

    def __init__(self, address: Address) -> None:
        """Name *address* in messages."""
        self.address = address
        self.opener = address.opener

    def begin(self, command: Begin | Open, opening: Any = None) -> Unit:
        """Begin a transaction, *opening* with it."""
        return PostgresUnit(at_once(begun(self, command, opening)))


class AsyncPostgresConnections(AsyncConnections):
    """Transactions on an event loop."""

    def __init__(self, address: Address) -> None:
        """Name *address* in messages."""
        self.address = address
        self.opener = address.opener

    begin = begun
