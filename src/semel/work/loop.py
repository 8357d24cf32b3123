"""Runs services for ever, each at its own interval: ``Workers`` in threads, ``AsyncWorkers`` on an event loop.

Whatever goes wrong in a run is logged, and the next run comes at its time. What a service does is its own affair.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections.abc import Sequence
from datetime import timedelta

from semel.errors import SemelError, StoreUnavailable
from semel.guard.running import run
from semel.stores.forks import start_afresh_in_children
from semel.work.service import AsyncService, Report, Service, has_done_nothing, outcome, together
from semel.work.wakeup import AsyncWakeup, Wakeup

#: How often a line of the log tells what was done, or that the store is still away: a relay may send a batch a second,
#: and each run is at DEBUG. Dead letters and other errors are told at once.
TELL_EVERY = timedelta(minutes=1)
#: Intervals vary by this share, so that processes that were started together do not stay together.
JITTER = 0.2

_logger = logging.getLogger("semel")

#: When one of the services last told that the store is away, in the store's words.
_Outages = dict[str, float]


class Workers:
    """Services in threads, one for each: a slow one does not hold up the others."""

    _loops: list[_Loop]
    _threads: list[threading.Thread]

    def __init__(self, services: Sequence[Service]) -> None:
        """Run *services*, once they are started."""
        self._services = tuple(services)
        self.start_afresh()
        start_afresh_in_children(self)

    def start(self) -> None:
        """Run each service now, and then at its interval. Does nothing where they run already."""
        if self._threads:
            return
        outages: _Outages = {}
        self._loops = [_Loop(each, Wakeup, outages) for each in self._services]
        self._threads = [
            threading.Thread(target=run, args=(_Loop.repeat, each), name=each.name, daemon=True) for each in self._loops
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Begin no more runs, and wait until those under way have ended."""
        for each in self._loops:
            each.stop()
        for thread in self._threads:
            thread.join()
        self._threads = []

    def start_afresh(self) -> None:
        """Have no threads: a forked child runs the services only if it starts them itself."""
        self._loops = []
        self._threads = []


class AsyncWorkers:
    """Services on an event loop, each in a task of its own."""

    def __init__(self, services: Sequence[AsyncService]) -> None:
        """Run *services*, once they are started."""
        self._services = tuple(services)
        self._loops: list[_Loop] = []
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def are_running(self) -> bool:
        """Whether they were started, and not stopped since."""
        return bool(self._tasks)

    def start(self) -> None:
        """Run each service now, and then at its interval, on the loop that is running. Does nothing where they run."""
        if self._tasks:
            return
        outages: _Outages = {}
        self._loops = [_Loop(each, AsyncWakeup, outages) for each in self._services]
        self._tasks = [asyncio.create_task(each.repeat(), name=each.name) for each in self._loops]

    async def stop(self) -> None:
        """Begin no more runs, and wait until those under way have ended."""
        for each in self._loops:
            each.stop()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []


class _Loop:
    """One service, again and again until it is stopped. In a thread, nothing in here waits for an event loop."""

    def __init__(self, service: Service | AsyncService, kind: type[Wakeup | AsyncWakeup], outages: _Outages) -> None:
        self._outages = outages
        self.name = f"semel-{service.name}"
        self._service = service
        self._wakeup: Wakeup | AsyncWakeup = getattr(service, "wakeup", None) or kind()
        self._is_stopping = False
        #: What was done since a line of the log last told it, and when that was.
        self._untold: Report | None = None
        self._told_at = float("-inf")

    def stop(self) -> None:
        self._is_stopping = True
        if (stop := getattr(self._service, "stop", None)) is not None:
            stop()
        self._wakeup.wake()

    async def repeat(self) -> None:
        while not self._is_stopping:
            heard = self._wakeup.count
            try:
                self._tell(await outcome(self._service.run_once()))
            except Exception:  # whatever it was, the thread must live to try again
                _logger.exception("The %s failed; the next run tries again.", self._service.name)
            if not self._is_stopping:
                await outcome(self._wakeup.wait(heard, _jittered(self._service.interval)))
        self._tell_rest()
        if (close := getattr(self._service, "close", None)) is not None:
            try:
                await outcome(close())
            except Exception:  # it ends in any case
                _logger.exception("The %s could not be closed.", self._service.name)

    def _tell(self, report: Report) -> None:
        if report.error is not None:
            level = logging.DEBUG if has_done_nothing(report) and self._is_told(report.error) else logging.ERROR
            _logger.log(level, "The %s was cut short; the next run goes on: %s", self._service.name, report)
            return
        self._outages.clear()
        if not report.is_idle:
            self._untold = report if self._untold is None else together(self._untold, report)
        has_dead = bool(getattr(report, "dead", 0))  # Dead letters wait for a person.
        is_due = has_dead or time.monotonic() - self._told_at >= TELL_EVERY.total_seconds()
        if is_due and self._untold is not None:
            self._tell_rest(has_dead=has_dead)
        else:
            _logger.debug("%s", report)

    def _is_told(self, error: SemelError) -> bool:
        """Whether a line of this minute has the *error*, where it is that the store is away."""
        if not isinstance(error, StoreUnavailable):
            return False
        told_at, now = self._outages.get(str(error), float("-inf")), time.monotonic()
        if now - told_at < TELL_EVERY.total_seconds():
            return True
        self._outages[str(error)] = now
        return False

    def _tell_rest(self, *, has_dead: bool = False) -> None:
        if self._untold is not None and has_dead:
            _logger.warning("%s; why: semel outbox list", self._untold)
        elif self._untold is not None:
            _logger.info("%s", self._untold)
        self._untold, self._told_at = None, time.monotonic()


def _jittered(interval: timedelta) -> float:
    return interval.total_seconds() * random.uniform(1 - JITTER, 1 + JITTER)  # noqa: S311 - no secret
