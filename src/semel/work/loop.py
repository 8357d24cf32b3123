"""Runs services for ever, each at its own interval: ``Workers`` in threads, ``AsyncWorkers`` on an event loop.

Whatever goes wrong in a run is logged, and the next run comes at its time. What a service does is its own affair.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections.abc import Sequence
from datetime import timedelta

from semel.stores.forks import start_afresh_in_children
from semel.work.service import AsyncHurried, AsyncService, Hurried, Report, Service
from semel.work.wakeup import AsyncWakeup, Wakeup

#: Intervals vary by this share, so that processes that were started together do not stay together.
JITTER = 0.2

_logger = logging.getLogger("semel")


class Workers:
    """Services in threads, one for each: a slow one does not hold up the others."""

    _stopping: threading.Event
    _threads: list[threading.Thread]

    def __init__(self, services: Sequence[Service]) -> None:
        """Run *services*, once they are started."""
        self._services = tuple((each, each.wakeup if isinstance(each, Hurried) else Wakeup()) for each in services)
        self.start_afresh()
        start_afresh_in_children(self)

    def start(self) -> None:
        """Run each service now, and then at its interval. Does nothing where they run already."""
        if self._threads:
            return
        stopping = self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=_repeat, args=(each, wakeup, stopping), name=f"semel-{each.name}", daemon=True)
            for each, wakeup in self._services
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Begin no more runs, and wait until those under way have ended."""
        self._stopping.set()
        for _, wakeup in self._services:
            wakeup.wake()
        for thread in self._threads:
            thread.join()
        self._threads = []

    def start_afresh(self) -> None:
        """Have no threads: a forked child runs the services only if it starts them itself."""
        self._stopping = threading.Event()
        self._threads = []


class AsyncWorkers:
    """Services on an event loop, each in a task of its own."""

    def __init__(self, services: Sequence[AsyncService]) -> None:
        """Run *services*, once they are started."""
        self._services = tuple(
            (each, each.wakeup if isinstance(each, AsyncHurried) else AsyncWakeup()) for each in services
        )
        self._stopping = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def are_running(self) -> bool:
        """Whether they were started, and not stopped since."""
        return bool(self._tasks)

    def start(self) -> None:
        """Run each service now, and then at its interval, on the loop that is running. Does nothing where they run."""
        if self._tasks:
            return
        stopping = self._stopping = asyncio.Event()
        self._tasks = [
            asyncio.create_task(_arepeat(each, wakeup, stopping), name=f"semel-{each.name}")
            for each, wakeup in self._services
        ]

    async def stop(self) -> None:
        """Begin no more runs, and wait until those under way have ended."""
        self._stopping.set()
        for _, wakeup in self._services:
            wakeup.wake()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []


def _repeat(service: Service, wakeup: Wakeup, stopping: threading.Event) -> None:
    while not stopping.is_set():
        heard = wakeup.count
        try:
            _tell(service.name, service.run_once())
        except Exception:  # whatever it was, the thread must live to try again
            _logger.exception("The %s failed; the next run tries again.", service.name)
        if not stopping.is_set():
            wakeup.wait(heard, _jittered(service.interval))


async def _arepeat(service: AsyncService, wakeup: AsyncWakeup, stopping: asyncio.Event) -> None:
    while not stopping.is_set():
        heard = wakeup.count
        try:
            _tell(service.name, await service.run_once())
        except Exception:  # as above
            _logger.exception("The %s failed; the next run tries again.", service.name)
        if not stopping.is_set():
            await wakeup.wait(heard, _jittered(service.interval))


def _tell(name: str, report: Report) -> None:
    if report.error is not None:
        _logger.error("The %s was cut short; the next run goes on: %s", name, report)
    else:
        _logger.log(logging.DEBUG if report.is_idle else logging.INFO, "%s", report)


def _jittered(interval: timedelta) -> float:
    return interval.total_seconds() * random.uniform(1 - JITTER, 1 + JITTER)  # noqa: S311 - no secret
