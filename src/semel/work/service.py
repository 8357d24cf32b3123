"""What a service is: something to be done again and again, that says each time what came of it. When is ``loop.py``'s.

A service keeps nothing that matters between two runs. Any number of processes may run the same one at once.
"""

from __future__ import annotations

from collections.abc import Awaitable
from datetime import timedelta
from typing import Protocol, TypeVar, runtime_checkable

from semel.core.commands import Command
from semel.core.events import Happening
from semel.errors import SemelError
from semel.stores import AsyncStore, Store
from semel.telemetry.logs import log
from semel.work.wakeup import AsyncWakeup, Wakeup

T = TypeVar("T")


class Report(Protocol):
    """What came of one run. As text it is one line."""

    @property
    def is_idle(self) -> bool:
        """Whether there was nothing to do."""

    @property
    def error(self) -> SemelError | None:
        """Why the run ended early, if it did."""


class Service(Protocol):
    """Something to be done again and again, in a thread."""

    @property
    def name(self) -> str:
        """What people know it by."""

    @property
    def interval(self) -> timedelta:
        """How long after one run the next begins."""

    def run_once(self) -> Report:
        """Do what there is to do now."""


class AsyncService(Protocol):
    """Something to be done again and again, on an event loop."""

    @property
    def name(self) -> str:
        """What people know it by."""

    @property
    def interval(self) -> timedelta:
        """How long after one run the next begins."""

    async def run_once(self) -> Report:
        """Do what there is to do now."""


@runtime_checkable
class Hurried(Protocol):
    """A service, in a thread, that somebody may have an errand for before its next run."""

    @property
    def wakeup(self) -> Wakeup:
        """What ends its pause."""


@runtime_checkable
class AsyncHurried(Protocol):
    """The same, on an event loop."""

    @property
    def wakeup(self) -> AsyncWakeup:
        """What ends its pause."""


class ServicePorts:
    """What a service's flow may ask for, in a thread."""

    def __init__(self, store: Store) -> None:
        """Ask *store*."""
        self._store = store

    async def ask(self, command: Command[T]) -> T:
        """Ask the store."""
        return self._store.perform(command)

    def tell(self, happening: Happening) -> None:
        """Log it."""
        log(happening)


class AsyncServicePorts:
    """What a service's flow may ask for, on an event loop."""

    #: A service that is stopped ends where it is: the next run goes on.
    is_interruptible = True

    def __init__(self, store: AsyncStore) -> None:
        """Ask *store*."""
        self._store = store

    def ask(self, command: Command[T]) -> Awaitable[T]:
        """Ask the store."""
        return self._store.perform(command)

    def tell(self, happening: Happening) -> None:
        """Log it."""
        log(happening)
