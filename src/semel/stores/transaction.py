"""A transaction of the application's own, which a few statements of the store's join. Drivers are in ``drivers/``.

In atomic mode it is open while the handler runs; in a phase, while the phase's function runs. The application writes
through ``connection``, in its driver's own type. Which statements join, and in what order, the flows say.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Protocol, TypeVar

from semel.core.commands import Begin, Command, Commit, CommitAlone, Finish, Open, Undo, Verdict
from semel.core.record import Found, Hold
from semel.errors import NoConnection
from semel.stores.statement import Joined

T = TypeVar("T")


class JoinedStatements(Protocol):
    """The statements of one store that join."""

    def begin(self, command: Begin) -> Joined[Hold | Found]:
        """Take the key's lock and read what is there."""

    def finish(self, command: Finish) -> Joined[Verdict]:
        """Write the finished record, if it is still what was seen."""

    def commit(self, command: Commit) -> Joined[Verdict]:
        """Write how far the operation has come, if its hold is live."""


class Unit(ABC):
    """One open transaction on one connection of some driver's. Used by one thread at a time."""

    #: In the driver's own type.
    connection: Any

    @abstractmethod
    def run(self, joined: Joined[T]) -> T:
        """Run one statement in the transaction. Raises ``StoreError`` for trouble with the server, the driver's own
        error for trouble with the data.
        """

    @abstractmethod
    def commit(self) -> None:
        """Commit, and let go of the connection. ``CommitUnknown``: the reply was lost. ``AnswerNotStored``: it was
        committed here, and may not have reached a replica that was to have it.
        """

    @abstractmethod
    def rollback(self) -> None:
        """Roll back, and let go of the connection; never raises. One that is broken, or whose state is not known, is
        closed rather than used again.
        """


class Connections(ABC):
    """Where units come from: a pool, an engine, a file."""

    @abstractmethod
    def begin(self, command: Begin | Open) -> Unit | Found:
        """Begin a transaction. ``Found``: this process knows already that the key is in use."""

    @abstractmethod
    def close(self) -> None:
        """Let go of what is this store's own. What the application gave, the application closes."""


class Transaction:
    """One transaction, from ``Begin`` or ``Open`` to its end."""

    def __init__(self, connections: Connections, statements: JoinedStatements) -> None:
        """Nothing is begun yet."""
        self._connections = connections
        self._statements = statements
        self._unit: Unit | None = None

    @property
    def connection(self) -> Any:
        """The open connection."""
        if self._unit is None:
            raise NoConnection
        return self._unit.connection

    def perform(self, command: Command[T]) -> T:
        """Carry out one command."""
        answer: Any = None
        match command:
            case Begin() | Open():
                answer = self._begin(command)
            case Finish():
                answer = self._end(self._statements.finish(command))
            case Commit():
                answer = self._end(self._statements.commit(command))
            case CommitAlone():
                self._take_unit().commit()
            case Undo():
                self._undo()
            case _:
                raise AssertionError(command)
        return answer  # type: ignore[no-any-return]  # by the command's own type

    def _begin(self, command: Begin | Open) -> Hold | Found | None:
        begun = self._connections.begin(command)
        if isinstance(begun, Found):
            return begun
        self._unit = begun
        if isinstance(command, Open):
            return None
        return begun.run(self._statements.begin(command))

    def _end(self, last: Joined[Verdict]) -> Verdict:
        unit = self._open_unit()
        verdict = unit.run(last)
        self._unit = None
        if verdict is Verdict.DONE:
            unit.commit()
        else:
            unit.rollback()
        return verdict

    def _undo(self) -> None:
        unit, self._unit = self._unit, None
        if unit is not None:
            unit.rollback()

    def _take_unit(self) -> Unit:
        unit, self._unit = self._open_unit(), None
        return unit

    def _open_unit(self) -> Unit:
        if self._unit is None:
            raise NoConnection
        return self._unit


class AsyncUnit(ABC):
    """The same on an event loop."""

    #: In the driver's own type.
    connection: Any

    @abstractmethod
    async def run(self, joined: Joined[T]) -> T:
        """As ``Unit.run``."""

    @abstractmethod
    async def commit(self) -> None:
        """As ``Unit.commit``. Cancelled in the middle, it closes the connection."""

    @abstractmethod
    async def rollback(self) -> None:
        """As ``Unit.rollback``."""


class AsyncConnections(ABC):
    """Where units come from on an event loop."""

    @abstractmethod
    async def begin(self, command: Begin | Open) -> AsyncUnit | Found:
        """As ``Connections.begin``."""

    @abstractmethod
    async def close(self) -> None:
        """As ``Connections.close``."""


class AsyncTransaction:
    """One transaction on an event loop, from ``Begin`` or ``Open`` to its end."""

    def __init__(self, connections: AsyncConnections, statements: JoinedStatements) -> None:
        """Nothing is begun yet."""
        self._connections = connections
        self._statements = statements
        self._unit: AsyncUnit | None = None

    @property
    def connection(self) -> Any:
        """The open connection."""
        if self._unit is None:
            raise NoConnection
        return self._unit.connection

    async def perform(self, command: Command[T]) -> T:
        """Carry out one command."""
        answer: Any = None
        match command:
            case Begin() | Open():
                answer = await self._begin(command)
            case Finish():
                answer = await self._end(self._statements.finish(command))
            case Commit():
                answer = await self._end(self._statements.commit(command))
            case CommitAlone():
                await self._take_unit().commit()
            case Undo():
                await self._undo()
            case _:
                raise AssertionError(command)
        return answer  # type: ignore[no-any-return]  # by the command's own type

    async def _begin(self, command: Begin | Open) -> Hold | Found | None:
        begun = await self._connections.begin(command)
        if isinstance(begun, Found):
            return begun
        self._unit = begun
        if isinstance(command, Open):
            return None
        return await begun.run(self._statements.begin(command))

    async def _end(self, last: Joined[Verdict]) -> Verdict:
        unit = self._open_unit()
        verdict = await unit.run(last)
        self._unit = None
        if verdict is Verdict.DONE:
            await unit.commit()
        else:
            await unit.rollback()
        return verdict

    async def _undo(self) -> None:
        unit, self._unit = self._unit, None
        if unit is not None:
            await unit.rollback()

    def _take_unit(self) -> AsyncUnit:
        unit, self._unit = self._open_unit(), None
        return unit

    def _open_unit(self) -> AsyncUnit:
        if self._unit is None:
            raise NoConnection
        return self._unit
