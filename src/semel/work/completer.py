"""The completer: runs stored requests. Those that were accepted, and those of operations whose client never came back.

It needs the application, since only that can run them: each middleware has a ``finish``. Several of them may share a
``Backlog``, and then that many operations are run at once.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from datetime import timedelta
from functools import partial

from semel.core.commands import Again, FindStuck
from semel.core.record import Stuck
from semel.core.upkeep import MAX_ATTEMPTS
from semel.errors import StoreError
from semel.flows.finish import FinishReport, finish_abandoned
from semel.guard.running import arun, run
from semel.stores import AsyncStore, Store
from semel.work.backlog import AsyncBacklog, Backlog
from semel.work.service import AsyncServicePorts, ServicePorts
from semel.work.wakeup import AsyncWakeup, Wakeup

_logger = logging.getLogger("semel")

_COULD_NOT = "An operation could not be run, and is tried again with the next look."

#: The status that an operation ended with; None: it did not end; ``AGAIN``: somebody else has it, or nobody may begin.
Finished = int | Again | None


class Completer(ServicePorts):
    """Finishes operations from a thread, one after the other."""

    name = "completer"

    def __init__(
        self,
        store: Store,
        finish: Callable[[Stuck], Finished],
        *,
        backlog: Backlog | None = None,
        max_attempts: int = MAX_ATTEMPTS,
    ) -> None:
        """Finish what is stuck in *store* through *finish*; park what was tried *max_attempts* times."""
        super().__init__(store)
        self._finish = finish
        self._backlog = backlog or Backlog()
        self._max_attempts = max_attempts
        #: How many it has run since it last looked.
        self._count = 0

    @property
    def interval(self) -> timedelta:
        """How long until the next look, whoever looks."""
        return self._backlog.left

    @property
    def wakeup(self) -> Wakeup:
        """What ends that before its time."""
        return self._backlog.wakeup

    def run_once(self) -> FinishReport:
        """Finish all whose time has come, and that no other has taken; but when the next look is due, leave the rest to
        the next run, which then comes at once: an operation that was accepted meanwhile must not wait for a backlog.
        """
        self._count = 0
        return run(finish_abandoned, self, max_attempts=self._max_attempts)

    async def find_stuck(self, command: FindStuck) -> tuple[Stuck, ...]:
        """Find the operations to run, unless another completer has just looked."""
        return self._backlog.find(self, partial(self._store.perform, command))

    async def finish_one(self, stuck: Stuck) -> Finished:
        """Run one of them, unless another completer has it."""
        if (self._count and self._backlog.is_stale) or not self._backlog.take(stuck):
            return Again.AGAIN
        self._count += 1
        try:
            return self._finish(stuck)
        except StoreError:
            raise
        except Exception:  # whatever it was, others wait behind it
            _logger.exception(_COULD_NOT)
            return None
        finally:
            self._backlog.done(stuck)


class AsyncCompleter(AsyncServicePorts):
    """Finishes operations from an event loop, one after the other."""

    name = "completer"

    def __init__(
        self,
        store: AsyncStore,
        finish: Callable[[Stuck], Awaitable[Finished]],
        *,
        backlog: AsyncBacklog | None = None,
        max_attempts: int = MAX_ATTEMPTS,
    ) -> None:
        """Finish what is stuck in *store* through *finish*; park what was tried *max_attempts* times."""
        super().__init__(store)
        self._finish = finish
        self._backlog = backlog or AsyncBacklog()
        self._max_attempts = max_attempts
        #: How many it has run since it last looked.
        self._count = 0

    @property
    def interval(self) -> timedelta:
        """How long until the next look, whoever looks."""
        return self._backlog.left

    @property
    def wakeup(self) -> AsyncWakeup:
        """What ends that before its time."""
        return self._backlog.wakeup

    async def run_once(self) -> FinishReport:
        """Finish all whose time has come, and that no other has taken; but when the next look is due, leave the rest to
        the next run, which then comes at once: an operation that was accepted meanwhile must not wait for a backlog.
        """
        self._count = 0
        return await arun(finish_abandoned, self, max_attempts=self._max_attempts)

    async def find_stuck(self, command: FindStuck) -> tuple[Stuck, ...]:
        """Find the operations to run, unless another completer has just looked."""
        return await self._backlog.find(self, partial(self._store.perform, command))

    async def finish_one(self, stuck: Stuck) -> Finished:
        """Run one of them, unless another completer has it."""
        if (self._count and self._backlog.is_stale) or not self._backlog.take(stuck):
            return Again.AGAIN
        self._count += 1
        try:
            return await self._finish(stuck)
        except StoreError:
            raise
        except Exception:  # as above
            _logger.exception(_COULD_NOT)
            return None
        finally:
            self._backlog.done(stuck)
