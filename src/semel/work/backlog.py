"""The operations that the completers of one process have found: ``Backlog`` for threads, ``AsyncBacklog`` for an event
loop. It runs nothing.

However many of them there are, the store is asked once in an interval what there is to do, and each operation is taken
by one of them. Between processes the store sees to that, as it always does.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from datetime import timedelta

from semel.core.hint import ACCEPTED
from semel.core.record import Stuck
from semel.errors import ConfigurationError
from semel.stores.forks import start_afresh_in_children
from semel.work.wakeup import AsyncWakeup, Wakeup

#: An operation waits for its client first, so nobody notices these seconds.
COMPLETE_INTERVAL = timedelta(seconds=5)
#: One that was accepted has a client who watches. It is one look at a small index.
ACCEPT_INTERVAL = timedelta(seconds=1)
#: How many operations are run at once in a process: most of them wait for others, and a few of them may be long.
CONCURRENCY = 4

#: For this share of the interval, nobody looks for what another has just looked for. Less than jitter leaves of it, so
#: that whoever wakes first looks.
_FRESH = 0.75

#: Begins to call back with what the store hears from other processes (``core/hint.py``).
Listen = Callable[[Callable[[str], None]], None]


def looks_every(*, is_accepting: bool) -> timedelta:
    """Return how often to look, in an app that accepts requests to be run later, or in another."""
    return ACCEPT_INTERVAL if is_accepting else COMPLETE_INTERVAL


def checked_concurrency(concurrency: object) -> int:
    """Return *concurrency* if so many operations can be run at once."""
    if isinstance(concurrency, int) and not isinstance(concurrency, bool) and concurrency >= 1:
        return concurrency
    raise ConfigurationError(f"concurrency is how many operations are run at once, 1 or more, not {concurrency!r}.")


class _Items:
    """What was found at the last look, and what is under way. It locks nothing."""

    def __init__(self, interval: timedelta) -> None:
        self._interval = interval.total_seconds()
        self._found: dict[tuple[str, str], Stuck] = {}
        self._under_way: set[tuple[str, str]] = set()
        #: When each scope was last served, counted in operations.
        self._served: dict[str, int] = {}
        self._count = 0
        self._looked_at: float | None = None
        self._looked_by: object = None
        self._heard = -1

    def put(self, found: tuple[Stuck, ...], who: object, heard: int) -> None:
        """Note what *who* has found; *heard* is how often the wakeup had rung before it looked."""
        self._found = {(each.hold.scope, each.hold.key): each for each in self._by_service(found)}
        self._looked_at, self._looked_by, self._heard = time.monotonic(), who, heard

    def is_fresh_for(self, who: object, heard: int) -> bool:
        """Whether another has just looked, and nobody has called since."""
        if self._looked_at is None or self._looked_by is who or self._heard != heard:
            return False
        return time.monotonic() - self._looked_at < _FRESH * self._interval

    def left(self) -> timedelta:
        """How long until the next look."""
        passed = 0.0 if self._looked_at is None else time.monotonic() - self._looked_at
        return timedelta(seconds=max(self._interval - passed, 0.0))

    @property
    def is_stale(self) -> bool:
        """Whether the next look is due."""
        return self._looked_at is not None and not self.left()

    @property
    def all(self) -> tuple[Stuck, ...]:
        """What nobody has taken yet, in the order in which it was found: scopes take turns."""
        return tuple(self._found.values())

    def take(self, stuck: Stuck) -> bool:
        """Take it, unless another has, or it was found to be otherwise meanwhile."""
        place = stuck.hold.scope, stuck.hold.key
        found = self._found.get(place)
        if found is None or found.hold != stuck.hold or place in self._under_way:
            return False
        del self._found[place]
        self._under_way.add(place)
        self._count += 1
        self._served[stuck.hold.scope] = self._count
        return True

    def done(self, stuck: Stuck) -> None:
        """Whatever became of it: the next look may find it again."""
        self._under_way.discard((stuck.hold.scope, stuck.hold.key))

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


class Backlog:
    """Shared by completers in threads."""

    _items: _Items
    _looking: threading.Lock
    _mutex: threading.Lock
    _is_listening: bool

    def __init__(self, interval: timedelta = COMPLETE_INTERVAL, listen: Listen | None = None) -> None:
        """Look every *interval*; and sooner when *listen* says that something was accepted."""
        self._interval = interval
        self._listen = listen
        self.wakeup = Wakeup()
        self.start_afresh()
        start_afresh_in_children(self)

    def start_afresh(self) -> None:
        """Have nothing on it."""
        self._items = _Items(self._interval)
        self._looking = threading.Lock()
        self._mutex = threading.Lock()
        self._is_listening = False

    def wake(self) -> None:
        """Have somebody look now: there is something to do."""
        self.wakeup.wake()

    @property
    def left(self) -> timedelta:
        """How long until the next look."""
        with self._mutex:
            return self._items.left()

    @property
    def is_stale(self) -> bool:
        """Whether the next look is due."""
        with self._mutex:
            return self._items.is_stale

    def find(self, who: object, look: Callable[[], tuple[Stuck, ...]]) -> tuple[Stuck, ...]:
        """Return what there is to do: what another has just found, or what *look* finds."""
        with self._looking:
            heard = self.wakeup.count
            with self._mutex:
                if self._items.is_fresh_for(who, heard):
                    return self._items.all
            if self._listen is not None and not self._is_listening:
                self._is_listening = True
                self._listen(self._hear)
            found: tuple[Stuck, ...] = ()
            try:
                found = look()
            finally:
                # Also where it failed: the others need not fail at once, too.
                with self._mutex:
                    self._items.put(found, who, heard)
            with self._mutex:
                return self._items.all

    def take(self, stuck: Stuck) -> bool:
        """Take it, unless another has."""
        with self._mutex:
            return self._items.take(stuck)

    def done(self, stuck: Stuck) -> None:
        """Say that it is no longer under way."""
        with self._mutex:
            self._items.done(stuck)

    def _hear(self, name: str) -> None:
        if name == ACCEPTED:
            self.wake()


class AsyncBacklog:
    """Shared by completers on an event loop."""

    def __init__(self, interval: timedelta = COMPLETE_INTERVAL, listen: Listen | None = None) -> None:
        """Look every *interval*; and sooner when *listen* says that something was accepted."""
        self._interval = interval
        self._listen = listen
        self.wakeup = AsyncWakeup()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._looking = asyncio.Lock()
        self._items = _Items(interval)

    def wake(self) -> None:
        """Have somebody look now: there is something to do."""
        self.wakeup.wake()

    @property
    def left(self) -> timedelta:
        """How long until the next look."""
        return self._items.left()

    @property
    def is_stale(self) -> bool:
        """Whether the next look is due."""
        return self._items.is_stale

    async def find(self, who: object, look: Callable[[], Awaitable[tuple[Stuck, ...]]]) -> tuple[Stuck, ...]:
        """Return what there is to do: what another has just found, or what *look* finds."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            # The loop that others looked on is gone, and they with it.
            self._loop, self._looking, self._items = loop, asyncio.Lock(), _Items(self._interval)
            if self._listen is not None:
                self._listen(self._hear)
        async with self._looking:
            heard = self.wakeup.count
            if self._items.is_fresh_for(who, heard):
                return self._items.all
            found: tuple[Stuck, ...] = ()
            try:
                found = await look()
            finally:
                # Also where it failed: the others need not fail at once, too.
                self._items.put(found, who, heard)
            return self._items.all

    def take(self, stuck: Stuck) -> bool:
        """Take it, unless another has."""
        return self._items.take(stuck)

    def done(self, stuck: Stuck) -> None:
        """Say that it is no longer under way."""
        self._items.done(stuck)

    def _hear(self, name: str) -> None:
        if name == ACCEPTED:
            self.wake()
