"""The completer: runs stored requests. Those that were accepted, and those that were abandoned by their client.

It needs the application, since only that can run them: each middleware has a ``finish``. Several of them may share a
backlog, and then that many operations are run at once.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from datetime import timedelta
from functools import partial
from typing import Any

from semel.core.commands import Again, FindStuck
from semel.core.commands.counts import COMPLETED
from semel.core.record import Stuck
from semel.core.upkeep import MAX_ATTEMPTS
from semel.errors import SecretMissing, StoreError
from semel.flows.finish import FinishReport, finish_abandoned
from semel.flows.ports import CompleterPorts
from semel.stores import AsyncStore
from semel.work.backlog import AsyncBacklog, Backlog, SharedBacklog
from semel.work.service import S_co, StoreService, outcome
from semel.work.wakeup import AsyncWakeup, Wakeup

_logger = logging.getLogger("semel")

#: The status that an operation ended with; None: it did not end; ``AGAIN``: another worker has it, or none may begin.
Finished = int | Again | None
#: Runs one operation. With a store for an event loop, it may be a coroutine function.
Finish = Callable[[Stuck], Finished | Awaitable[Finished]]


class Completer(StoreService[S_co, FinishReport]):
    """Finishes operations, one after the other."""

    name = "completer"

    def __init__(
        self,
        store: S_co,
        finish: Finish,
        *,
        backlog: SharedBacklog[S_co] | None = None,
        max_attempts: int = MAX_ATTEMPTS,
    ) -> None:
        """Finish what is stuck in *store* through *finish*; park what was tried *max_attempts* times."""
        kind: Any = AsyncBacklog if isinstance(store, AsyncStore) else Backlog
        self._backlog: SharedBacklog[S_co] = backlog or kind()
        super().__init__(store, self._backlog.interval)
        self._finish = finish
        self._max_attempts = max_attempts
        #: How many it has run since it last looked.
        self._count = 0

    @property
    def interval(self) -> timedelta:
        """How long until the next look, whichever completer looks."""
        return self._backlog.left

    @property
    def wakeup(self) -> Wakeup | AsyncWakeup:
        """What ends that before its time."""
        return self._backlog.wakeup

    async def flow(self, ports: CompleterPorts) -> FinishReport:
        """Finish all that are due and that no other has taken; but when the next look is due, leave the rest to
        the next run, which then comes at once: an operation that was accepted meanwhile must not wait for a backlog.
        """
        self._count = 0
        return await finish_abandoned(ports, max_attempts=self._max_attempts)

    async def find_stuck(self, command: FindStuck) -> tuple[Stuck, ...]:
        """Find the operations to run, unless another completer has just looked."""
        return await self._backlog.find(self, partial(self.ask, command))

    async def finish_one(self, stuck: Stuck) -> Finished:
        """Run one of them, unless another completer has it."""
        if (self._count and self._backlog.is_stale) or not self._backlog.take(stuck):
            return Again.AGAIN
        self._count += 1
        try:
            status = await outcome(self._finish(stuck))
        except SecretMissing as error:
            # Of this one: those behind it may have been stored with a secret that is here.
            _logger.error("An operation could not be run: %s", error)  # noqa: TRY400 - it says all that there is to say
            return None
        except StoreError:
            raise
        except Exception:  # whatever it was, others wait behind it
            _logger.exception("An operation could not be run, and is tried again with the next look.")
            return None
        finally:
            self._backlog.done(stuck)
        if isinstance(status, int):
            self._store.ended[COMPLETED] += 1
        return status


class AsyncCompleter(Completer[AsyncStore]):
    """The same, of a store for an event loop."""
