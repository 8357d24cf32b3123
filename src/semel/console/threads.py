"""A few threads of the console's own, in which a server has pages made, so that none takes it for ever. It knows no
page.

They are not the loop's default executor, nor a server's own threads: a store that does not answer would fill those, and
the host application with them. A thread that hangs is left behind, and keeps no process alive.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import copy_context
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from semel.stores.forks import start_afresh_in_children

T = TypeVar("T")

#: Pages that are made at once.
MAX_THREADS = 8
#: How long a page may take. The store's own limits, a connection and a statement, are within it.
PAGE_SECONDS = 15.0


class AllBusy(Exception):
    """Every thread is busy."""


class _Job(Generic[T]):
    """One call, and what it will return."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._context = copy_context()
        self.future: Future[T] = Future()

    def run(self) -> Callable[[], None]:
        """Make the call, and return how to tell what it has returned."""
        if not self.future.set_running_or_notify_cancel():
            return lambda: None
        try:
            return partial(self.future.set_result, self._context.run(self._call))
        except BaseException as error:  # noqa: BLE001 - it is raised where it is awaited
            return partial(self.future.set_exception, error)


class Threads:
    """Runs calls in threads, which are started when they are needed."""

    def __init__(self, most: int = MAX_THREADS, seconds: float = PAGE_SECONDS) -> None:
        """Start none yet. Each call may take *seconds*."""
        self._most = most
        self._seconds = seconds
        self.start_afresh()
        start_afresh_in_children(self)

    def start_afresh(self) -> None:
        """Have no threads: in a forked child they do not exist."""
        self._mutex = threading.Lock()
        self._jobs: SimpleQueue[_Job[Any] | None] = SimpleQueue()
        self._started = 0
        self._busy = 0

    async def run(self, call: Callable[[], T]) -> T:
        """Return what *call* does. ``AllBusy``: no thread is free; ``TimeoutError``: it has not ended yet."""
        return await asyncio.wait_for(asyncio.wrap_future(self._begin(call)), self._seconds)

    def wait(self, call: Callable[[], T]) -> T:
        """The same for a caller that has no loop."""
        return self._begin(call).result(self._seconds)

    def _begin(self, call: Callable[[], T]) -> Future[T]:
        job = _Job(call)
        with self._mutex:
            if self._busy >= self._most:
                raise AllBusy
            self._busy += 1
            if self._busy > self._started:
                threading.Thread(target=self._work, args=(self._jobs,), name="semel-console", daemon=True).start()
                self._started += 1
            self._jobs.put(job)
        return job.future

    def close(self) -> None:
        """Let the threads end, each after the call that it is at. Further calls start others."""
        with self._mutex:
            ending, self._started = self._started, 0
            jobs, self._jobs = self._jobs, SimpleQueue()
        for _ in range(ending):
            jobs.put(None)

    def _work(self, jobs: SimpleQueue[_Job[Any] | None]) -> None:
        while (job := jobs.get()) is not None:
            tell = job.run()
            # Before the answer is told: the next request may come at once.
            with self._mutex:
                self._busy -= 1
            tell()
