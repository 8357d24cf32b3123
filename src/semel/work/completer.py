"""The completer: finishes operations whose client never came back, by running their stored requests again.

It needs the application, since only that can run them: each door's middleware has a ``finish``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

from semel.core.commands import Command, FinishOne
from semel.core.record import Stuck
from semel.core.upkeep import MAX_ATTEMPTS
from semel.drivers import arun, run
from semel.flows.finish import FinishReport, finish_abandoned
from semel.stores import AsyncStore, Store
from semel.work.service import async_performer, performer

#: An operation waits for its client first, so nobody notices these seconds.
COMPLETE_INTERVAL = timedelta(seconds=5)


class Completer:
    """Finishes operations from a thread."""

    name = "completer"

    def __init__(
        self,
        store: Store,
        finish: Callable[[Stuck], int | None],
        *,
        interval: timedelta = COMPLETE_INTERVAL,
        max_attempts: int = MAX_ATTEMPTS,
    ) -> None:
        """Finish what is stuck in *store* through *finish*; park what was tried *max_attempts* times."""
        self.interval = interval
        self._finish = finish
        self._max_attempts = max_attempts
        self._others = performer(store)

    def run_once(self) -> FinishReport:
        """Finish all whose time has come."""
        return run(finish_abandoned(max_attempts=self._max_attempts), self._perform)

    def _perform(self, command: Command[Any]) -> Any:
        return self._finish(command.stuck) if isinstance(command, FinishOne) else self._others(command)


class AsyncCompleter:
    """Finishes operations from an event loop."""

    name = "completer"

    def __init__(
        self,
        store: AsyncStore,
        finish: Callable[[Stuck], Awaitable[int | None]],
        *,
        interval: timedelta = COMPLETE_INTERVAL,
        max_attempts: int = MAX_ATTEMPTS,
    ) -> None:
        """Finish what is stuck in *store* through *finish*; park what was tried *max_attempts* times."""
        self.interval = interval
        self._finish = finish
        self._max_attempts = max_attempts
        self._others = async_performer(store)

    async def run_once(self) -> FinishReport:
        """Finish all whose time has come."""
        return await arun(finish_abandoned(max_attempts=self._max_attempts), self._perform)

    def _perform(self, command: Command[Any]) -> Any:
        return self._finish(command.stuck) if isinstance(command, FinishOne) else self._others(command)
