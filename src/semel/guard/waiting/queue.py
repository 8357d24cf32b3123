"""The queue of waiters for each key, in order of arrival, and the time of the last read. Nothing here waits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from weakref import WeakKeyDictionary

from semel.core.commands import Again
from semel.core.handler import TooManyWaiters, Wait
from semel.core.record import Found

#: How often the store is asked about a key: short for a user, and little load for the database.
POLL_INTERVAL = timedelta(seconds=1)

Told = Found | Again | TooManyWaiters
#: Registers a callback for the names of operations that end (``core/hint.py``), in any process.
Listen = Callable[[Callable[[str], None]], None]


class Gone(Enum):
    """The caller has gone, and does not wait any more."""

    GONE = "gone"


class Slot(ABC):
    """The place of one waiter in a queue, for one wait."""

    __slots__ = ("__weakref__",)

    @abstractmethod
    def tell(self, told: Told | Gone) -> None:
        """Wake the waiter with *told*. Only the first call counts."""


class Waiter:
    """One call that waits, over all its rounds of waiting and asking the store."""

    __slots__ = ("__weakref__", "came_at", "deadline", "is_over", "slot")

    def __init__(self) -> None:
        """Not waiting yet."""
        self.came_at = 0.0
        #: When its waiting ends; None before it begins.
        self.deadline: float | None = None
        self.slot: Slot | None = None
        #: The caller has gone.
        self.is_over = False

    def begin(self, now: float, patience: timedelta) -> None:
        """Start to wait at *now*, for at most *patience*."""
        self.came_at, self.deadline = now, now + patience.total_seconds()

    def leave(self) -> None:
        """Stop waiting, now and later: a wait raises ``Interrupted``. On a loop, call it from that loop only."""
        self.is_over = True
        # The order matters: a wait sets its slot first and then reads is_over.
        slot = self.slot
        if slot is not None:
            slot.tell(Gone.GONE)


@dataclass(slots=True)
class _Queue:
    """The waiters for one key."""

    #: When one of them last asked the store, or was told to. The first one had asked before it began to wait.
    asked_at: float
    slots: dict[Slot, None] = field(default_factory=dict)


class Queues:
    """The queues of all keys. It takes no lock."""

    def __init__(self) -> None:
        """Start with no waiters."""
        self._queues: dict[str, _Queue] = {}
        self.count = 0

    def count_of(self, name: str) -> int:
        """Return the number of waiters for one key."""
        queue = self._queues.get(name)
        return len(queue.slots) if queue else 0

    def take(self, name: str, slot: Slot, now: float) -> None:
        """Add a waiter at the end of the queue."""
        queue = self._queues.get(name)
        if queue is None:
            queue = self._queues[name] = _Queue(now)
        queue.slots[slot] = None
        self.count += 1

    def leave(self, name: str, slot: Slot) -> None:
        """Remove a waiter."""
        queue = self._queues[name]
        del queue.slots[slot]
        self.count -= 1
        if not queue.slots:
            del self._queues[name]

    def first(self, name: str) -> Slot | None:
        """Return the waiter that has waited longest for a key since it last asked."""
        queue = self._queues.get(name)
        return next(iter(queue.slots)) if queue else None

    def all(self, name: str) -> tuple[Slot, ...]:
        """Return all waiters for a key."""
        queue = self._queues.get(name)
        return tuple(queue.slots) if queue else ()

    def names(self) -> tuple[str, ...]:
        """Return the keys that have waiters."""
        return tuple(self._queues)

    def asked_at(self, name: str) -> float:
        """Return when a waiter for this key asked last. The key must have waiters."""
        return self._queues[name].asked_at

    def send(self, name: str, now: float) -> None:
        """Let the first waiter for a key ask the store."""
        queue = self._queues.get(name)
        if queue is not None:
            queue.asked_at = now
            next(iter(queue.slots)).tell(Again.AGAIN)

    def expire(self, name: str, slot: Slot, waiter: Waiter, now: float) -> None:
        """End a wait because its time is over; or let it ask once more, if no waiter has asked since it began."""
        queue = self._queues[name]
        if queue.asked_at > waiter.came_at:
            slot.tell(TooManyWaiters.TOO_MANY)
        else:
            queue.asked_at = now
            slot.tell(Again.AGAIN)


class Looking:
    """The waiters that ask the store now, and may wait again: they still count against the limits. It takes no lock.

    Otherwise, while all of them ask, as many new ones could begin to wait. A call that ends without a further wait is
    removed when it is collected, and at the latest when its time is over.
    """

    def __init__(self) -> None:
        """Start with none."""
        self._names: WeakKeyDictionary[Waiter, str] = WeakKeyDictionary()

    def add(self, waiter: Waiter, name: str) -> None:
        """Count a waiter that asks the store about a key."""
        self._names[waiter] = name

    def discard(self, waiter: Waiter) -> None:
        """Stop counting it: it waits again, or has ended."""
        self._names.pop(waiter, None)

    def names(self, now: float) -> list[str]:
        """Return the key of each of them."""
        return [name for waiter, name in self._names.items() if not waiter.is_over and now < (waiter.deadline or now)]


def most(command: Wait, usual: int) -> int:
    """Return how many may wait at once in this process."""
    return usual if command.max_waiters is None else command.max_waiters
