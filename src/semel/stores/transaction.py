"""A transaction of the application's own, which a few statements of the store's join. Drivers are in ``drivers/``.

In atomic mode it is open while the handler runs; in a phase, while the phase's function runs. The application writes
through ``connection``, in its driver's own type. Which statements join, and in what order, the flows say.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeVar

from semel.core.commands import Begin, Command, Commit, CommitAlone, Finish, Open, Undo, Verdict
from semel.core.record import Found, Hold
from semel.core.value import value
from semel.errors import NoConnection, Overtaken
from semel.stores.statement import Joined

T = TypeVar("T")

#: How often a transaction is begun whose only snapshot is older than what another has committed meanwhile.
TRIES = 3


@value
class Begun:
    """What the first look of a transaction saw."""

    seen: Hold | Found
    #: Whether all statements of the transaction see what its first one saw, and a second look can see nothing new.
    keeps_snapshot: bool = False

    @property
    def lets_run(self) -> bool:
        """Whether the handler would be run."""
        return not isinstance(self.seen, Found) or self.seen.may_be_taken


class JoinedStatements(Protocol):
    """The statements of one store that join."""

    def opening(self, command: Begin) -> str | None:
        """Take the key's lock by a statement without parameters, which brings a row if the lock was free. None: to
        begin is to have the lock.
        """

    def begin(self, command: Begin) -> Joined[Begun]:
        """Take the key's lock, if the transaction does not have it yet, and read what is there."""

    def probe(self, command: Begin) -> Sequence[Joined[None]]:
        """Fail where a record was committed after the snapshot that the transaction keeps."""

    def finish(self, command: Finish) -> Joined[Verdict]:
        """Write the finished record, if it is still what was seen."""

    def commit(self, command: Commit) -> Joined[Verdict]:
        """Write how far the operation has come, if its hold is live."""


class Durability(Protocol):
    """Whether what the application commits is on the disk when COMMIT is answered."""

    def question(self) -> Joined[None] | None:
        """Return what is to be asked in the next transaction, if anything is."""


class Unit(ABC):
    """One open transaction on one connection of some driver's. Used by one thread at a time."""

    #: In the driver's own type.
    connection: Any
    #: Whether it had the key's lock before its first look.
    has_lock: bool = False

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

    #: Makes a connection of the driver's, to keep, as the application makes its own; None: the store's URL says how.
    opener: Callable[[], Any] | None = None

    @abstractmethod
    def begin(self, command: Begin | Open, opening: str | None = None) -> Unit | Found:
        """Begin a transaction. ``Found``: this process knows already that the key is in use. *opening* is sent together
        with BEGIN where that takes no round trip of its own, and left out elsewhere.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of what is this store's own. What the application gave, the application closes."""


class Transaction:
    """One transaction, from ``Begin`` or ``Open`` to its end."""

    def __init__(
        self, connections: Connections, statements: JoinedStatements, durability: Durability | None = None
    ) -> None:
        """Nothing is begun yet."""
        self._connections = connections
        self._statements = statements
        self._durability = durability
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
        opening = self._statements.opening(command) if isinstance(command, Begin) else None
        for is_last in (*(False,) * (TRIES - 1), True):
            begun = self._connections.begin(command, opening)
            if isinstance(begun, Found):
                return begun
            self._unit = begun
            if self._durability and (question := self._durability.question()):
                begun.run(question)
            if isinstance(command, Open):
                return None
            try:
                return self._look(begun, command)
            except Overtaken:
                if is_last:
                    raise
                self._undo()
        raise AssertionError  # pragma: no cover - the last round returned or raised

    def _look(self, unit: Unit, command: Begin) -> Hold | Found:
        """Read what is there, with a snapshot that is younger than the lock if the handler is to run."""
        look = self._statements.begin(command)
        begun = unit.run(look)
        if begun.lets_run and begun.keeps_snapshot:
            for statement in self._statements.probe(command):
                unit.run(statement)
        elif begun.lets_run and not unit.has_lock:
            begun = unit.run(look)
        return begun.seen

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
    #: Whether it had the key's lock before its first look.
    has_lock: bool = False

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

    #: As ``Connections.opener``, to be awaited.
    opener: Callable[[], Awaitable[Any]] | None = None

    @abstractmethod
    async def begin(self, command: Begin | Open, opening: str | None = None) -> AsyncUnit | Found:
        """As ``Connections.begin``."""

    @abstractmethod
    async def close(self) -> None:
        """As ``Connections.close``."""


class AsyncTransaction:
    """One transaction on an event loop, from ``Begin`` or ``Open`` to its end."""

    def __init__(
        self, connections: AsyncConnections, statements: JoinedStatements, durability: Durability | None = None
    ) -> None:
        """Nothing is begun yet."""
        self._connections = connections
        self._statements = statements
        self._durability = durability
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
        opening = self._statements.opening(command) if isinstance(command, Begin) else None
        for is_last in (*(False,) * (TRIES - 1), True):
            begun = await self._connections.begin(command, opening)
            if isinstance(begun, Found):
                return begun
            self._unit = begun
            if self._durability and (question := self._durability.question()):
                await begun.run(question)
            if isinstance(command, Open):
                return None
            try:
                return await self._look(begun, command)
            except Overtaken:
                if is_last:
                    raise
                await self._undo()
        raise AssertionError  # pragma: no cover - the last round returned or raised

    async def _look(self, unit: AsyncUnit, command: Begin) -> Hold | Found:
        """As ``Transaction._look``."""
        look = self._statements.begin(command)
        begun = await unit.run(look)
        if begun.lets_run and begun.keeps_snapshot:
            for statement in self._statements.probe(command):
                await unit.run(statement)
        elif begun.lets_run and not unit.has_lock:
            begun = await unit.run(look)
        return begun.seen

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
