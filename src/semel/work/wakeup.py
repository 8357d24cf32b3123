"""What ends a service's pause early: ``Wakeup`` for threads, ``AsyncWakeup`` for an event loop. It runs nothing.

It counts how often it rang, so that one which rings while a service is at work is not missed: its pause is over before
it begins.
"""

from __future__ import annotations

import asyncio
import threading

from semel.stores.forks import start_afresh_in_children


class Wakeup:
    """Wakes every thread that waits for it."""

    _condition: threading.Condition

    def __init__(self) -> None:
        """Be silent."""
        self.count = 0
        self.start_afresh()
        start_afresh_in_children(self)

    def start_afresh(self) -> None:
        """Start with no waiters."""
        self._condition = threading.Condition()

    def wake(self) -> None:
        """Wake all who wait, from whatever thread."""
        with self._condition:
            self.count += 1
            self._condition.notify_all()

    def wait(self, heard: int, seconds: float) -> None:
        """Wait *seconds*, or until it has rung once more than was *heard*."""
        with self._condition:
            self._condition.wait_for(lambda: self.count != heard, seconds)


class AsyncWakeup:
    """Wakes every task that waits for it."""

    def __init__(self) -> None:
        """Be silent."""
        self.count = 0
        self._waiters: set[asyncio.Future[None]] = set()

    def wake(self) -> None:
        """Wake all who wait, on their loop."""
        self.count += 1
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self, heard: int, seconds: float) -> None:
        """Wait *seconds*, or until it has rung once more than was *heard*."""
        if self.count != heard:
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await asyncio.wait([waiter], timeout=seconds)
        finally:
            self._waiters.discard(waiter)
