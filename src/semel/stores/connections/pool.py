"""Pools of connections of the store's own, for threads and for an event loop: so many at once, and no more. What a
connection is, and what is sent on it, is not known here.

Drivers' own pools cost a thread, or a task for each connection that is given back. These have neither: what was idle
for too long is closed when the next is given back.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from threading import BoundedSemaphore
from typing import Generic, TypeVar

C = TypeVar("C")

#: How long a connection is kept that is not used.
MAX_IDLE_SECONDS = 300


class AllInUse(Exception):
    """Every connection was in use for all of the time that was given."""


class _Idle(Generic[C]):
    """The connections that are not in use, the last used first."""

    def __init__(self, close: Callable[[C], None]) -> None:
        self._close = close
        #: Each with the time at which it was last used.
        self.connections: deque[tuple[float, C]] = deque()
        self._is_closed = False

    def pop(self) -> C | None:
        try:
            return self.connections.pop()[1]
        except IndexError:
            return None

    def push(self, connection: C) -> None:
        now = time.monotonic()
        self.connections.append((now, connection))
        if self._is_closed:
            self.drop()
        elif self.connections[0][0] < now - MAX_IDLE_SECONDS:
            self._drop_oldest()

    def drop(self) -> None:
        """Close all of them."""
        while (connection := self.pop()) is not None:
            self._close(connection)

    def close(self) -> None:
        """Close all of them, and those that are given back from now on."""
        self._is_closed = True
        self.drop()

    def _drop_oldest(self) -> None:
        try:
            self._close(self.connections.popleft()[1])
        except IndexError:
            return  # another thread was faster


class Pool(Generic[C]):
    """At most *size* connections, for threads."""

    def __init__(self, size: int, connect: Callable[[], C], close: Callable[[C], None]) -> None:
        """Nothing is connected yet."""
        self.size = size
        self._connect = connect
        self._places = BoundedSemaphore(size)
        self.idle = _Idle(close)

    def take(self, wait_seconds: float) -> C:
        """Return one that was idle, or a new one. Raises ``AllInUse``, and what connecting raises."""
        if not self._places.acquire(timeout=wait_seconds):
            raise AllInUse
        try:
            return self.idle.pop() or self._connect()
        except BaseException:
            self._places.release()
            raise

    def give_back(self, connection: C | None) -> None:
        """Take one back; None: it was closed."""
        if connection is not None:
            self.idle.push(connection)
        self._places.release()


class AsyncPool(Generic[C]):
    """At most *size* connections, for one event loop."""

    def __init__(self, size: int, connect: Callable[[], Awaitable[C]], close: Callable[[C], None]) -> None:
        """Nothing is connected yet."""
        self.size = size
        self.loop = asyncio.get_running_loop()
        self._connect = connect
        self._places = asyncio.Semaphore(size)
        self.idle = _Idle(close)

    async def take(self, wait_seconds: float) -> C:
        """As ``Pool.take``."""
        if self._places.locked():
            try:
                async with asyncio.timeout(wait_seconds):
                    await self._places.acquire()
            except TimeoutError:
                raise AllInUse from None
        else:
            await self._places.acquire()  # it does not wait
        idle = self.idle.connections
        try:
            return idle.pop()[1] if idle else await self._connect()
        except BaseException:
            self._places.release()
            raise

    def give_back(self, connection: C | None) -> None:
        """As ``Pool.give_back``."""
        if connection is not None:
            self.idle.push(connection)
        self._places.release()
