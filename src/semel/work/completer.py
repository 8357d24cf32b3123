"""The completer: runs stored requests. Those that were accepted, and those of operations whose client never came back.

It needs the application, since only that can run them: each door's middleware has a ``finish``. Several of them may
share a ``Desk``, and then that many operations are run at once.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from datetime import timedelta
from functools import partial
from typing import Any

from semel.core.commands import Again, Command, FindStuck, FinishOne
from semel.core.record import Stuck
from semel.core.upkeep import MAX_ATTEMPTS
from semel.drivers import arun, run
from semel.errors import StoreError
from semel.flows.finish import FinishReport, finish_abandoned
from semel.stores import AsyncStore, Store
from semel.work.alarm import Alarm, AsyncAlarm
from semel.work.desk import AsyncDesk, Desk
from semel.work.service import async_performer, performer

_logger = logging.getLogger("semel")

_COULD_NOT = "An operation could not be run, and is tried again with the next look."

#: The status that an operation ended with; None: it did not end; ``AGAIN``: somebody else has it, or nobody may begin.
Finished = int | Again | None


class Completer:
    """Finishes operations from a thread, one after the other."""

    name = "completer"

    def __init__(
        self,
        store: Store,
        finish: Callable[[Stuck], Finished],
        *,
        desk: Desk | None = None,
        max_attempts: int = MAX_ATTEMPTS,
    ) -> None:
        """Finish what is stuck in *store* through *finish*; park what was tried *max_attempts* times."""
        self._finish = finish
        self._desk = desk or Desk()
        self._max_attempts = max_attempts
        #: How many it has run since it last looked.
        self._count = 0
        self._others = performer(store)

    @property
    def interval(self) -> timedelta:
        """How long until the next look, whoever looks."""
        return self._desk.left

    @property
    def alarm(self) -> Alarm:
        """What ends that before its time."""
        return self._desk.alarm

    def run_once(self) -> FinishReport:
        """Finish all whose time has come, and that no other has taken; but when the next look is due, leave the rest to
        the next run, which then comes at once: an operation that was accepted meanwhile must not wait for a backlog.
        """
        self._count = 0
        return run(finish_abandoned(max_attempts=self._max_attempts), self._perform)

    def _perform(self, command: Command[Any]) -> Any:
        match command:
            case FindStuck():
                return self._desk.find(self, partial(self._others, command))
            case FinishOne(stuck):
                if (self._count and self._desk.is_stale) or not self._desk.take(stuck):
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
                    self._desk.done(stuck)
            case _:
                return self._others(command)


class AsyncCompleter:
    """Finishes operations from an event loop, one after the other."""

    name = "completer"

    def __init__(
        self,
        store: AsyncStore,
        finish: Callable[[Stuck], Awaitable[Finished]],
        *,
        desk: AsyncDesk | None = None,
        max_attempts: int = MAX_ATTEMPTS,
    ) -> None:
        """Finish what is stuck in *store* through *finish*; park what was tried *max_attempts* times."""
        self._finish = finish
        self._desk = desk or AsyncDesk()
        self._max_attempts = max_attempts
        #: How many it has run since it last looked.
        self._count = 0
        self._others = async_performer(store)

    @property
    def interval(self) -> timedelta:
        """How long until the next look, whoever looks."""
        return self._desk.left

    @property
    def alarm(self) -> AsyncAlarm:
        """What ends that before its time."""
        return self._desk.alarm

    async def run_once(self) -> FinishReport:
        """Finish all whose time has come, and that no other has taken; but when the next look is due, leave the rest to
        the next run, which then comes at once: an operation that was accepted meanwhile must not wait for a backlog.
        """
        self._count = 0
        return await arun(finish_abandoned(max_attempts=self._max_attempts), self._perform)

    def _perform(self, command: Command[Any]) -> Any:
        match command:
            case FindStuck():
                return self._desk.find(self, partial(self._others, command))
            case FinishOne(stuck):
                return self._finish_one(stuck)
            case _:
                return self._others(command)

    async def _finish_one(self, stuck: Stuck) -> Finished:
        if (self._count and self._desk.is_stale) or not self._desk.take(stuck):
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
            self._desk.done(stuck)
