"""What a service is: something to be done again and again, that says each time what came of it. When is ``loop.py``'s.

A service keeps nothing that matters between two runs. Any number of processes may run the same one at once. It is
written once, as a flow: the store that it is made with says whether that runs in a thread or on an event loop.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Coroutine
from dataclasses import fields, is_dataclass, replace
from datetime import timedelta
from typing import Any, ClassVar, Generic, Protocol, TypeVar, cast, overload

from semel.core.commands import Command
from semel.core.events import Happening
from semel.errors import SemelError
from semel.guard.running import arun, run
from semel.stores import AsyncStore, Store
from semel.stores.transaction import at_once
from semel.telemetry.stream import tell

T = TypeVar("T")
#: The kind of store: for threads, or for an event loop.
S_co = TypeVar("S_co", bound=Store | AsyncStore, covariant=True)
R_co = TypeVar("R_co", covariant=True)


class Report(Protocol):
    """What came of one run: a dataclass, of which the numbers are counts. As text it is one line."""

    @property
    def is_idle(self) -> bool:
        """Whether there was nothing to do."""

    @property
    def error(self) -> SemelError | None:
        """Why the run ended early, if it did."""


R = TypeVar("R", bound=Report)
#: Of a report, what is so at its end, and was not done.
_LEVELS = frozenset({"batch", "endpoints", "left", "unreachable"})


def facts_of(report: Report) -> dict[str, Any]:
    """Say for machines what came of a run: the fields of a report, which is a dataclass."""
    facts: dict[str, Any] = {each.name: getattr(report, each.name) for each in fields(cast("Any", report))}
    return facts | {"error": str(report.error) if report.error else None}


def together(one: R, other: R) -> R:
    """Return what came of two runs, of which *other* was the later: what was done is counted together."""
    later: Any = other
    if not is_dataclass(type(later)):
        return other  # An application's own. Nothing is known of its numbers.
    names = [each.name for each in fields(later) if each.name not in _LEVELS]
    counts = {
        name: getattr(one, name) + getattr(other, name) for name in names if isinstance(getattr(other, name), int)
    }
    return cast("R", replace(later, **counts))


def has_done_nothing(report: Report) -> bool:
    """Whether a run had done nothing by the time that an error ended it, as far as is known."""
    known: Any = report
    return not is_dataclass(type(known)) or bool(replace(known, error=None).is_idle)


class _Timed(Protocol):
    @property
    def name(self) -> str:
        """What people know it by."""

    @property
    def interval(self) -> timedelta:
        """How long after one run the next begins."""


class Service(_Timed, Protocol):
    """Something to be done again and again, in a thread. One that has a ``wakeup`` may be run before its time."""

    def run_once(self) -> Report:
        """Do what there is to do now."""


class AsyncService(_Timed, Protocol):
    """The same on an event loop."""

    def run_once(self) -> Awaitable[Report]:
        """Do what there is to do now."""


async def outcome(result: T | Awaitable[T]) -> T:
    """Return what a call in a thread has returned, or what one on an event loop has begun."""
    return await result if isinstance(result, Awaitable) else result


class ServicePorts:
    """What a service's flow may ask for."""

    #: A service that is stopped ends where it is: the next run goes on.
    is_interruptible = True

    def __init__(self, store: Store | AsyncStore) -> None:
        """Ask *store*."""
        self._store = store

    async def ask(self, command: Command[T]) -> T:
        """Ask the store."""
        return await outcome(self._store.perform(command))

    def tell(self, happening: Happening) -> None:
        """Log it."""
        tell(happening)


class StoreService(ServicePorts, ABC, Generic[S_co, R_co]):
    """A service of a store: its name, its interval, and its flow."""

    name: ClassVar[str]

    def __init__(self, store: S_co, interval: timedelta) -> None:
        """Serve *store* every *interval*."""
        super().__init__(store)
        self._interval = interval

    @property
    def interval(self) -> timedelta:
        """How long after one run the next begins."""
        return self._interval

    def stop(self) -> None:
        """Begin nothing new in the run that is under way. Called once, before the last run ends."""

    def close(self) -> Any:
        """Let go of what it holds, after its last run; with a store for an event loop, this is to be awaited."""
        return self.let_go() if isinstance(self._store, AsyncStore) else at_once(self.let_go())

    async def let_go(self) -> None:
        """Let go of what it holds: nothing, most of the time. In a thread, nothing in here waits for a loop."""

    @abstractmethod
    async def flow(self, ports: Any) -> R_co:
        """Do what there is to do now, by *ports*: this service, as a flow is to have it."""

    @overload
    def run_once(self: StoreService[Store, R_co]) -> R_co: ...
    @overload
    def run_once(self: StoreService[AsyncStore, R_co]) -> Coroutine[Any, Any, R_co]: ...
    def run_once(self) -> R_co | Coroutine[Any, Any, R_co]:
        """Do what there is to do now; with a store for an event loop, this is to be awaited."""
        return self._run_on_loop() if isinstance(self._store, AsyncStore) else run(self.flow, self)

    async def _run_on_loop(self) -> R_co:
        return await arun(self.flow, self)
