"""A transaction of the application's own, which a few statements of the store's join. Drivers are in ``connections/``.

In atomic mode it is open while the handler runs; in a phase, while the phase's function runs. The application writes
through ``connection``, in its driver's own type. Which statements join, and in what order, the flows say.

What is done is written once, as coroutines. On an event loop they are awaited; in a thread nothing in them ever waits
for a loop, so one step runs each to its end (``at_once``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, ClassVar, Protocol, TypeVar

from semel.core.commands import Begin, Command, Commit, CommitAlone, Finish, Open, Undo, Verdict
from semel.core.record import Found, Hold
from semel.core.value import value
from semel.errors import NoConnection, Overtaken
from semel.stores.dialect import Dialect
from semel.stores.statement import Joined

T = TypeVar("T")

#: How often a transaction is begun again because its only snapshot is older than what another has committed meanwhile.
TRIES = 3


@value
class Begun:
    """What the first look of a transaction saw."""

    seen: Hold | Found
    #: Whether all statements of the transaction see what its first one saw, and a second look can see nothing new.
    keeps_snapshot: bool = False
    #: Whether it is known that the handler will not be run, whatever another look would see.
    is_final: bool = False

    @property
    def lets_run(self) -> bool:
        """Whether the handler would be run."""
        return not isinstance(self.seen, Found) or self.seen.may_be_taken


class Fenced(Exception):
    """The record is not the one that was seen. A statement that writes it fails by this, so that no COMMIT which was
    sent with it is carried out.
    """


class JoinedStatements(Protocol):
    """The statements of one store that join."""

    @property
    def has_questions(self) -> bool:
        """Whether something is to be asked before a handler is run, as once in the life of a store."""

    def questions(self) -> Iterable[Joined[Any]]:
        """Ask it, one statement after the other. Raises ``StoreError`` where no handler can be run."""

    def opening(self, command: Begin) -> Sequence[Joined[Any]] | None:
        """Take the key's lock, and look, with a snapshot that is younger than the lock: the last of these brings no row
        if the lock is ours, nothing is there and the record could be written. They are sent together with BEGIN where
        that takes no round trip of its own. None: to begin is to have the lock.
        """

    def begin(self, command: Begin) -> Joined[Begun]:
        """Take the key's lock, if the transaction does not have it yet, and read what is there."""

    def probe(self, command: Begin) -> Sequence[Joined[None]]:
        """Fail where a record was committed after the snapshot that the transaction keeps."""

    def finish(self, command: Finish) -> Joined[Verdict]:
        """Write the finished record, if it is still what was seen; else it is ``FENCED``, or raises ``Fenced``."""

    def commit(self, command: Commit) -> Joined[Verdict]:
        """Write how far the operation has come, if its hold is live; else as ``finish``."""


class Durability(Protocol):
    """Whether what the application commits is on the disk when COMMIT is answered."""

    def question(self) -> Joined[None] | None:
        """Return what is to be asked in the next transaction, if anything is."""


class _AnyUnit:
    """What units have in both colours."""

    #: In the driver's own type.
    connection: Any
    #: Whether it had the key's lock before its first look.
    has_lock: bool = False
    #: Whether the opening, sent with BEGIN, has found that nothing is in the way: there is no need to look.
    is_clear: bool = False
    #: Whether there is a ``commit_with``.
    pipelines: bool = False


class Unit(_AnyUnit, ABC):
    """One open transaction on one connection of some driver's. Used by one thread at a time."""

    @abstractmethod
    def run(self, joined: Joined[T]) -> T:
        """Run one statement in the transaction. Raises ``StoreError`` for trouble with the server, ``Fenced``, and the
        driver's own error for trouble with the data.
        """

    def commit_with(self, last: Joined[Any]) -> None:
        """Run the *last* statement and commit, in one round trip; or else roll back. ``Fenced`` where that statement
        finds another record than it should. In any case the connection is let go of.
        """
        raise NotImplementedError

    @abstractmethod
    def commit(self) -> None:
        """Commit, and let go of the connection. ``CommitUnknown``: the reply was lost. ``AnswerNotStored``: it was
        committed here, and may not have reached a replica that was to have it.
        """

    @abstractmethod
    def rollback(self) -> None:
        """Roll back, and let go of the connection; never raises. One that is broken, or in an unknown state, is
        closed rather than used again.
        """


class Connections(ABC):
    """Where units come from: a pool, an engine, a file."""

    #: Makes a connection of the driver's, to keep, as the application makes its own; None: the store's URL says how.
    opener: Callable[[], Any] | None = None

    @abstractmethod
    def begin(self, command: Begin | Open, opening: Any = None) -> Unit | Found:
        """Begin a transaction. ``Found``: this process knows already that the key is in use. *opening*, of
        ``JoinedStatements``, is sent with BEGIN where that takes no round trip of its own, and left out elsewhere.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of what is this store's own. What the application gave, the application closes."""


class AsyncUnit(_AnyUnit, ABC):
    """The same on an event loop."""

    @abstractmethod
    async def run(self, joined: Joined[T]) -> T:
        """As ``Unit.run``."""

    async def commit_with(self, last: Joined[Any]) -> None:
        """As ``Unit.commit_with``. Cancelled in the middle, it closes the connection."""
        raise NotImplementedError

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
    async def begin(self, command: Begin | Open, opening: Any = None) -> AsyncUnit | Found:
        """As ``Connections.begin``."""

    @abstractmethod
    async def close(self) -> None:
        """As ``Connections.close``."""


class _Kernel:
    """One transaction, in either colour: where a unit *waits*, what its methods return is awaited."""

    #: Whether what it returns is to be awaited.
    waits: bool

    def __init__(self, connections: Any, statements: JoinedStatements, durability: Durability | None = None) -> None:
        """Nothing is begun yet."""
        self._connections = connections
        self._statements = statements
        self._durability = durability
        self._unit: Any = None

    @property
    def connection(self) -> Any:
        """The open connection."""
        return self._opened.connection

    @property
    def dialect(self) -> Dialect | None:
        """Which database it is on, for further statements that join it; None: on none."""
        dialect: Dialect | None = getattr(getattr(self, "_statements", None), "dialect", None)
        return dialect

    @property
    def _opened(self) -> Any:
        if self._unit is None:
            raise NoConnection
        return self._unit

    async def _begin(self, command: Begin) -> Hold | Found:
        opening = self._statements.opening(command)
        for is_last in (*(False,) * (TRIES - 1), True):
            unit = self._connections.begin(command, opening)
            if self.waits:
                unit = await unit
            if isinstance(unit, Found):
                return unit
            self._unit = unit
            if self._durability is not None:
                await self._ask_durability(unit)
            if self._statements.has_questions:
                for question in self._statements.questions():
                    await self._run(unit, question)
            if unit.is_clear:
                claim = command.claim
                return Hold(claim.scope, claim.key, 1, claim.token)
            try:
                return await self._look(unit, command)
            except Overtaken:
                if is_last:
                    raise
                await self._undo()
        raise AssertionError  # pragma: no cover - the last round returned or raised

    async def _open(self, command: Open) -> None:
        unit = self._connections.begin(command)
        self._unit = (await unit) if self.waits else unit
        if self._durability is not None:
            await self._ask_durability(self._unit)

    async def _ask_durability(self, unit: Any) -> None:
        if self._durability is not None and (question := self._durability.question()):
            await self._run(unit, question)

    async def _look(self, unit: Any, command: Begin) -> Hold | Found:
        """Read what is there, with a snapshot that is younger than the lock if the handler is to run."""
        look = self._statements.begin(command)
        ran = unit.run(look)
        begun: Begun = (await ran) if self.waits else ran
        if begun.is_final or not begun.lets_run:
            return begun.seen
        if begun.keeps_snapshot:
            for statement in self._statements.probe(command):
                await self._run(unit, statement)
        elif not unit.has_lock:
            begun = await self._run(unit, look)
        return begun.seen

    def _finish(self, command: Finish) -> Coroutine[Any, Any, Verdict]:
        return self._end(self._statements.finish(command))

    def _commit(self, command: Commit) -> Coroutine[Any, Any, Verdict]:
        return self._end(self._statements.commit(command))

    async def _end(self, last: Joined[Verdict]) -> Verdict:
        unit = self._unit
        if unit is None:
            raise NoConnection
        try:
            if unit.pipelines:
                self._unit = None
                ending = unit.commit_with(last)
                if self.waits:
                    await ending
                return Verdict.DONE
            verdict: Verdict = await self._run(unit, last)
        except Fenced:
            verdict = Verdict.FENCED
        if not unit.pipelines:
            self._unit = None
            ending = unit.commit() if verdict is Verdict.DONE else unit.rollback()
            if self.waits:
                await ending
        return verdict

    async def _commit_alone(self, _: CommitAlone) -> None:
        unit, self._unit = self._unit, None
        if unit is None:
            raise NoConnection
        ending = unit.commit()
        if self.waits:
            await ending

    async def _undo(self, _: Undo | None = None) -> None:
        unit, self._unit = self._unit, None
        if unit is not None:
            ending = unit.rollback()
            if self.waits:
                await ending

    async def _run(self, unit: Any, joined: Joined[Any]) -> Any:
        ran = unit.run(joined)
        return (await ran) if self.waits else ran

    _HOW: ClassVar[dict[type[Command[Any]], Callable[..., Coroutine[Any, Any, Any]]]] = {
        Begin: _begin,
        Open: _open,
        Finish: _finish,
        Commit: _commit,
        CommitAlone: _commit_alone,
        Undo: _undo,
    }


class Transaction(_Kernel):
    """One transaction, from ``Begin`` or ``Open`` to its end."""

    waits = False

    def run(self, joined: Joined[T]) -> T:
        """Run one more statement in it, while it is open."""
        answer: T = self._opened.run(joined)
        return answer

    def perform(self, command: Command[T]) -> T:
        """Carry out one command."""
        answer: T = at_once(self._HOW[type(command)](self, command))
        return answer


class AsyncTransaction(_Kernel):
    """One transaction on an event loop, from ``Begin`` or ``Open`` to its end."""

    waits = True

    def run(self, joined: Joined[T]) -> Coroutine[Any, Any, T]:
        """Run one more statement in it, while it is open."""
        running: Coroutine[Any, Any, T] = self._opened.run(joined)
        return running

    def perform(self, command: Command[T]) -> Coroutine[Any, Any, T]:
        """Carry out one command."""
        return self._HOW[type(command)](self, command)


def at_once(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run to its end, in a thread, a coroutine in which nothing waits for an event loop."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        answer: T = stop.value
        return answer
    coroutine.close()
    raise RuntimeError(f"{coroutine!r} waits for an event loop, and there is none in this thread.")
