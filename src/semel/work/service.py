"""What a service is: something to be done again and again, that says each time what came of it. When is ``loop.py``'s.

A service keeps nothing that matters between two runs. Any number of processes may run the same one at once.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Protocol, runtime_checkable

from semel.core.commands import Command, Tell
from semel.drivers import AsyncPerform, Perform
from semel.errors import SemelError
from semel.stores import AsyncStore, Store
from semel.telemetry.logs import log
from semel.work.alarm import Alarm, AsyncAlarm


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
    def alarm(self) -> Alarm:
        """What ends its pause."""


@runtime_checkable
class AsyncHurried(Protocol):
    """The same, on an event loop."""

    @property
    def alarm(self) -> AsyncAlarm:
        """What ends its pause."""


def performer(store: Store) -> Perform:
    """Return what carries out the commands of a service's flow."""

    def perform(command: Command[Any]) -> Any:
        return log(command.happening) if isinstance(command, Tell) else store.perform(command)

    return perform


def async_performer(store: AsyncStore) -> AsyncPerform:
    """Return the same for an event loop."""

    def perform(command: Command[Any]) -> Any:
        return log(command.happening) if isinstance(command, Tell) else store.perform(command)

    return perform
