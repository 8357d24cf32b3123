"""The operations that the completers of one process have found: ``Backlog`` for threads, ``AsyncBacklog`` for an event
loop. It runs nothing.

However many completers there are, the store is asked once in an interval what there is to do, and each operation is
taken by one of them. Between processes the store sees to that, as it always does.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from datetime import timedelta
from typing import Generic

from semel.core.hint import ACCEPTED
from semel.core.record import Stuck
from semel.stores import AsyncStore, Store
from semel.stores.forks import start_afresh_in_children
from semel.work.service import S_co
from semel.work.wakeup import AsyncWakeup, Wakeup

#: An operation waits for its client first, so these seconds are not noticed.
COMPLETE_INTERVAL = timedelta(seconds=5)
#: One that was accepted has a client who watches. It is one look at a small index.
ACCEPT_INTERVAL = timedelta(seconds=1)
#: How many operations are run at once in a process: most of them wait for others, and a few of them may be long.
CONCURRENCY = 4

#: For this share of the interval, what another completer has found is not looked for again. Less than jitter leaves of
#: it, so that the first to wake looks.
_FRESH = 0.75

#: Begins to call back with what the store hears from other processes (``core/hint.py``).
Listen = Callable[[Callable[[str], None]], None]
#: Asks the store what there is to do.
Look = Callable[[], Awaitable[tuple[Stuck, ...]]]


def looks_every(*, is_accepting: bool) -> timedelta:
    """Return how often to look, in an app that accepts requests to be run later, or in another."""
    return ACCEPT_INTERVAL if is_accepting else COMPLETE_INTERVAL


class _ThreadLock:
    """A lock that blocks its thread, with the face of one for an event loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    async def __aenter__(self) -> None:
        self._lock.acquire()

    async def __aexit__(self, *_: object) -> None:
        self._lock.release()


class SharedBacklog(Generic[S_co]):
    """What completers share: what was found at the last look, and what is under way."""

    _new_lock: Callable[[], AbstractAsyncContextManager[None]]
    _new_wakeup: Callable[[], Wakeup | AsyncWakeup]

    def __init__(self, interval: timedelta = COMPLETE_INTERVAL, listen: Listen | None = None) -> None:
        """Look every *interval*; and sooner when *listen* says that something was accepted."""
        self.interval = interval
        self.wakeup = self._new_wakeup()
        self._listen = listen
        self.start_afresh()
        start_afresh_in_children(self)

    def start_afresh(self) -> None:
        """Have nothing on it."""
        #: Held by the completer that looks, and by one that reads or writes what was found.
        self._looking, self._mutex = self._new_lock(), threading.Lock()
        self._found: dict[tuple[str, str], Stuck] = {}
        self._under_way: set[tuple[str, str]] = set()
        #: When each scope was last served, counted in operations.
        self._served: dict[str, int] = {}
        self._count = 0
        self._looked_at: float | None = None
        self._looked_by: object = None
        self._heard = -1
        self._is_listening = False

    def wake(self) -> None:
        """Have one of them look now: there is something to do."""
        self.wakeup.wake()

    @property
    def left(self) -> timedelta:
        """How long until the next look."""
        passed = 0.0 if self._looked_at is None else time.monotonic() - self._looked_at
        return max(self.interval - timedelta(seconds=passed), timedelta())

    @property
    def is_stale(self) -> bool:
        """Whether the next look is due."""
        return self._looked_at is not None and not self.left

    async def find(self, who: object, look: Look) -> tuple[Stuck, ...]:
        """Return what there is to do: what another than *who* has just found, or what *look* finds.

        Scopes take turns in it.
        """
        async with self._looking:
            # Counted before the look: what is accepted during it may have been missed.
            heard = self.wakeup.count
            if not self._is_fresh_for(who, heard):
                if self._listen is not None and not self._is_listening:
                    self._is_listening = True
                    self._listen(self._hear)
                found: tuple[Stuck, ...] = ()
                try:
                    found = await look()
                finally:
                    # Also where it failed: the others need not fail at once, too.
                    with self._mutex:
                        self._found = {_place(each): each for each in self._by_service(found)}
                        self._looked_at, self._looked_by, self._heard = time.monotonic(), who, heard
            with self._mutex:
                return tuple(self._found.values())

    def take(self, stuck: Stuck) -> bool:
        """Take it, unless another has, or it was found to be otherwise meanwhile."""
        place = _place(stuck)
        with self._mutex:
            found = self._found.get(place)
            if found is None or found.hold != stuck.hold or place in self._under_way:
                return False
            del self._found[place]
            self._under_way.add(place)
            self._count += 1
            self._served[stuck.hold.scope] = self._count
            return True

    def done(self, stuck: Stuck) -> None:
        """Say that it is no longer under way: the next look may find it again."""
        with self._mutex:
            self._under_way.discard(_place(stuck))

    def _hear(self, name: str) -> None:
        if name == ACCEPTED:
            self.wake()

    def _is_fresh_for(self, who: object, heard: int) -> bool:
        """Whether another has just looked, and there was no call since."""
        if self._looked_at is None or self._looked_by is who or self._heard != heard:
            return False
        return time.monotonic() - self._looked_at < _FRESH * self.interval.total_seconds()

    def _by_service(self, found: tuple[Stuck, ...]) -> list[Stuck]:
        """Let scopes take turns, as the store does, but those that were served last come last: where operations are so
        long that there is a look after each, the scope that has waited longest would have every turn.
        """
        scopes = {each.hold.scope for each in found}
        self._served = {scope: count for scope, count in self._served.items() if scope in scopes}
        turns: Counter[str] = Counter()
        placed = []
        for each in found:
            turns[each.hold.scope] += 1
            placed.append((turns[each.hold.scope], self._served.get(each.hold.scope, 0), each))
        placed.sort(key=lambda place: place[:2])
        return [each for *_, each in placed]


class Backlog(SharedBacklog[Store]):
    """Shared by completers in threads."""

    _new_lock = _ThreadLock
    _new_wakeup = Wakeup


class AsyncBacklog(SharedBacklog[AsyncStore]):
    """Shared by completers on an event loop."""

    _new_lock = asyncio.Lock
    _new_wakeup = AsyncWakeup
    _loop: asyncio.AbstractEventLoop | None = None

    async def find(self, who: object, look: Look) -> tuple[Stuck, ...]:
        """Return what there is to do."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            # The loop that others looked on is gone, and they with it.
            self._loop = loop
            self.start_afresh()
        return await super().find(who, look)


def _place(stuck: Stuck) -> tuple[str, str]:
    return stuck.hold.scope, stuck.hold.key
