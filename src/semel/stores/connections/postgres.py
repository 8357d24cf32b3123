"""Transactions on PostgreSQL, over whichever driver: how they begin and end, and what their errors mean. How a driver
sends something, and where its connections come from, the drivers' own files say.

It is written once, as coroutines over an ``Executor``; see ``stores/transaction.py`` for how a thread runs them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from enum import Enum, auto
from typing import Any, Protocol, TypeVar

from semel.core.commands import Begin, Open
from semel.errors import StoreError, StoreReadOnly, StoreUnavailable
from semel.stores.connections.endings import (
    COMMIT_SECONDS,
    RESET,
    ROLLBACK_SECONDS,
    Notices,
    commit_sql,
    ended_inside,
    is_fence,
    lost,
    of_commit,
    of_statement,
    tells_clear,
)
from semel.stores.connections.script import Prepared, is_short, plain
from semel.stores.postgres.address import Address
from semel.stores.postgres.durability import FOR_TRANSACTION
from semel.stores.statement import Joined
from semel.stores.transaction import AsyncConnections, AsyncUnit, Connections, Fenced, Unit, at_once

T = TypeVar("T")

#: There is no prepared statement of that name.
_NOT_PREPARED = "26000"


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
        self.is_off = is_off
        self.prepared = Prepared()


class Executor(Protocol):
    """One connection of a driver's, for one transaction."""

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
        """Return how to begin: in the isolation that the application has asked for, and read-only if it has asked for
        that. Never READ WRITE: that would force a server which was made read-only on purpose.
        """

    async def script(self, sql: str, limit: float | None = None) -> str | None:
        """Send statements without parameters in one round trip; return the last one's command tag. *limit* is in
        seconds, where there is anything to limit it with.
        """

    async def fetch(self, sql: str, parameters: Sequence[Any]) -> Sequence[Sequence[Any]]:
        """Run one statement."""

    async def begun(self) -> None:
        """Have the driver take the transaction for one of its own, before it is begun."""

    async def over(self) -> None:
        """Have the driver forget it, before it ends."""

    def hear(self, notices: Notices, *, listens: bool) -> None:
        """Begin or stop to tell *notices* what the server says beside."""

    def failed_inside(self) -> Exception:
        """Return what the driver raises in a transaction that has failed."""

    def drop(self) -> None:
        """Close the connection at once."""

    async def let_go(self) -> None:
        """Give it back as it was, or close it, if it is in a transaction still. Never raises."""


class Kernel:
    """One transaction on one executor."""

    def __init__(self, executor: Executor, address: Address) -> None:
        """Nothing is begun yet."""
        self.executor = executor
        self._address = address
        self.is_clear = False
        session = executor.session
        # Through a pooler, what is deferred is run before COMMIT: an error of that and one of ours look the same.
        self.pipelines = session is None or session.is_direct

    async def begin(self, opening: Sequence[Joined[Any]] | None) -> None:
        """Begin, and look whether the handler can be run, in one round trip."""
        executor, session = self.executor, self.executor.session
        statements = [executor.begin_sql()]
        if session is not None:
            statements.insert(0, RESET)
            if session.is_off:
                statements.append(FOR_TRANSACTION)
        await executor.begun()
        tag = await self._sent(statements, opening or ())
        self.is_clear = opening is not None and tells_clear(tag)

    async def run(self, joined: Joined[T]) -> T:
        """Run one statement in the transaction."""
        executor = self.executor
        self._check_open()
        try:
            rows = await executor.fetch(joined.query.numbered, joined.in_order)
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

    async def commit_with(self, last: Joined[Any]) -> None:
        """Run *last* and commit, in one round trip; or else roll back."""
        try:
            if is_short(last):
                self._check_open()
                sent = self._text([last])
            else:
                await self.run(last)
                sent = None
        except BaseException:
            await self.rollback()
            raise
        await self.commit(sent)

    async def commit(self, last: str | None = None) -> None:
        """Commit, with the text of a statement before that."""
        executor, session, notices = self.executor, self.executor.session, Notices()
        try:
            self._check_before_commit()
            commit = commit_sql(is_direct=session.is_direct, is_off=session.is_off) if session else "COMMIT"
            await executor.over()
            executor.hear(notices, listens=True)
            try:
                tag = await executor.script(f"{last}; {commit}" if last else commit, COMMIT_SECONDS)
            finally:
                executor.hear(notices, listens=False)
            self._note_sent()
        except executor.faults as error:
            if last is not None and executor.status in _IN_TRANSACTION:
                # COMMIT ends the transaction even where it is refused. This one goes on, so it was the statement.
                await self._rolled_back()
                self._raise_known(error)
            else:
                self._raise_of_commit(error)
            raise
        except BaseException:
            executor.drop()
            raise
        finally:
            await self._end()
        if tag != "COMMIT":
            raise executor.failed_inside()
        notices.check(self._address)

    async def rollback(self) -> None:
        """Roll back, and let go of the connection."""
        try:
            await self.executor.over()
            if self.executor.status in _IN_TRANSACTION:
                await self._rolled_back()
        finally:
            await self._end()

    async def _rolled_back(self) -> None:
        executor = self.executor
        try:
            await executor.script("ROLLBACK", ROLLBACK_SECONDS)
        except executor.faults:
            executor.drop()
        except BaseException:
            executor.drop()
            raise

    async def _sent(self, statements: list[str], opening: Sequence[Joined[Any]]) -> str | None:
        executor = self.executor
        try:
            if opening:
                statements.append(self._text(opening))
            tag = await executor.script("; ".join(statements))
        except executor.faults as error:
            self._raise_known(error)
            raise
        self._note_sent()
        return tag

    def _text(self, statements: Sequence[Joined[Any]]) -> str:
        """Return *statements* as one text: on a connection of our own they stay prepared, unless a pooler is there."""
        session = self.executor.session
        if session is not None and session.is_direct:
            return session.prepared.script(statements)
        return "; ".join(map(plain, statements))

    def _note_sent(self) -> None:
        if self.executor.session is not None:
            self.executor.session.prepared.note_sent()

    async def _end(self) -> None:
        session = self.executor.session
        if session is not None and session.prepared.is_unsure:
            self.executor.drop()
        await self.executor.let_go()

    def _raise_of_commit(self, error: Exception) -> None:
        executor = self.executor
        known = of_commit(error, _sqlstate(error), self._address, is_lost=executor.status is Status.LOST)
        if known is not None:
            executor.drop()
            raise known from error
        if executor.status in _IN_TRANSACTION:  # what was deferred has failed before COMMIT
            executor.drop()

    def _check_open(self) -> None:
        if self.executor.status is Status.IDLE:
            raise ended_inside()

    def _check_before_commit(self) -> None:
        self._check_open()
        if self.executor.status is Status.LOST:
            raise lost(self._address)

    def _raise_known(self, error: Exception) -> None:
        sqlstate = _sqlstate(error)
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


def _sqlstate(error: BaseException) -> str | None:
    return getattr(error, "sqlstate", None)


async def begun(connections: Any, address: Address, opening: Sequence[Joined[Any]] | None) -> Kernel:
    """Begin a transaction: ``take`` gives an executor, ``renew`` replaces what is idle and may be useless."""
    for is_last in (False, True):
        kernel = Kernel(await connections.take(), address)
        try:
            await kernel.begin(opening)
        except StoreError:
            # The server was restarted, or another is the primary now: what else is idle is as useless.
            was_broken = kernel.executor.status is Status.LOST
            await kernel.rollback()
            if is_last or not was_broken:
                raise
            await connections.renew()
        except Exception:
            await kernel.rollback()
            raise
        except BaseException:
            kernel.executor.drop()
            await kernel.rollback()
            raise
        else:
            return kernel
    raise AssertionError  # pragma: no cover - the last round returned or raised


class PostgresUnit(Unit):
    """One open transaction, for a thread."""

    def __init__(self, kernel: Kernel) -> None:
        """It is begun."""
        self._kernel = kernel
        self.connection = kernel.executor.connection
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


class AsyncPostgresUnit(AsyncUnit):
    """One open transaction, on an event loop."""

    def __init__(self, kernel: Kernel) -> None:
        """It is begun."""
        self._kernel = kernel
        self.connection = kernel.executor.connection
        self.has_lock = self.is_clear = kernel.is_clear
        self.pipelines = kernel.pipelines

    async def run(self, joined: Joined[T]) -> T:
        """Run one statement in the transaction."""
        return await self._kernel.run(joined)

    async def commit_with(self, last: Joined[Any]) -> None:
        """Run the last statement and commit."""
        await self._kernel.commit_with(last)

    async def commit(self) -> None:
        """Commit."""
        await self._kernel.commit()

    async def rollback(self) -> None:
        """Roll back, whether or not we are cancelled meanwhile."""
        await asyncio.shield(self._kernel.rollback())


class PostgresConnections(Connections):
    """Transactions for threads."""

    def __init__(self, address: Address) -> None:
        """Name *address* in messages."""
        self._address = address
        self.opener = address.opener

    def begin(self, command: Begin | Open, opening: Any = None) -> Unit:  # noqa: ARG002 - the same for both
        """Begin a transaction, *opening* with it."""
        return PostgresUnit(at_once(begun(self, self._address, opening)))


class AsyncPostgresConnections(AsyncConnections):
    """Transactions on an event loop."""

    def __init__(self, address: Address) -> None:
        """Name *address* in messages."""
        self._address = address
        self.opener = address.opener

    async def begin(self, command: Begin | Open, opening: Any = None) -> AsyncUnit:  # noqa: ARG002 - the same for both
        """Begin a transaction, *opening* with it."""
        return AsyncPostgresUnit(await begun(self, self._address, opening))
