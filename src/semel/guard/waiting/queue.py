"""Who waits for which key, in the order in which they came, and when one of them asked last. Nothing here waits."""

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

#: How often the store is asked about a key: a person does not notice, and neither does the database.
POLL_INTERVAL = timedelta(seconds=1)

Told = Found | Again | TooManyWaiters
#: Begins to call back with the names of operations that end (``core/hint.py``), in whatever process.
Listen = Callable[[Callable[[str], None]], None]


class Gone(Enum):
    """Nobody is there any more who wants to be told anything."""

    GONE = "gone"


class Slot(ABC):
    """Where one waits, until it is told something."""

    __slots__ = ("__weakref__",)

    @abstractmethod
    def tell(self, told: Told | Gone) -> None:
        """Say it. What was said before counts, and this does not."""


class Waiter:
    """One call's stay, over all the times that it sits down, looks, and sits down again."""

    __slots__ = ("__weakref__", "came_at", "deadline", "is_over", "slot")

    def __init__(self) -> None:
        """It has not come yet, and may never."""
        self.came_at = 0.0
        #: Until when it waits, once it does.
        self.deadline: float | None = None
        self.slot: Slot | None = None
        #: Nobody is there any more to be answered.
        self.is_over = False

    def begin(self, now: float, patience: timedelta) -> None:
        """Count the time from here."""
        self.came_at, self.deadline = now, now + patience.total_seconds()

    def leave(self) -> None:
        """Wait no longer, now or later: ``Interrupted`` is raised to whoever does. On a loop, only from that loop."""
        self.is_over = True
        # After that, never before: whoever sits down looks at the two in the other order.
        slot = self.slot
        if slot is not None:
            slot.tell(Gone.GONE)


@dataclass(slots=True)
class _Queue:
    """Those who wait for one key."""

    #: When one of them asked last, or was sent to. The first of them had asked before it sat down.
    asked_at: float
    slots: dict[Slot, None] = field(default_factory=dict)


class Queues:
    """All who wait in one slot. It locks nothing."""

    def __init__(self) -> None:
        """Nobody waits."""
        self._queues: dict[str, _Queue] = {}
        self.count = 0

    def count_of(self, name: str) -> int:
        """Return how many wait for one key."""
        queue = self._queues.get(name)
        return len(queue.slots) if queue else 0

    def take(self, name: str, slot: Slot, now: float) -> None:
        """Sit down behind the others."""
        queue = self._queues.get(name)
        if queue is None:
            queue = self._queues[name] = _Queue(now)
        queue.slots[slot] = None
        self.count += 1

    def leave(self, name: str, slot: Slot) -> None:
        """Get up."""
        queue = self._queues[name]
        del queue.slots[slot]
        self.count -= 1
        if not queue.slots:
            del self._queues[name]

    def first(self, name: str) -> Slot | None:
        """Return who has waited longest for a key, since it asked."""
        queue = self._queues.get(name)
        return next(iter(queue.slots)) if queue else None

    def all(self, name: str) -> tuple[Slot, ...]:
        """Return all who wait for a key."""
        queue = self._queues.get(name)
        return tuple(queue.slots) if queue else ()

    def names(self) -> tuple[str, ...]:
        """Return the keys that somebody waits for."""
        return tuple(self._queues)

    def asked_at(self, name: str) -> float:
        """Return when one of those who wait for a key asked last. There are some."""
        return self._queues[name].asked_at

    def send(self, name: str, now: float) -> None:
        """Have the first of those who wait for a key ask the store."""
        queue = self._queues.get(name)
        if queue is not None:
            queue.asked_at = now
            next(iter(queue.slots)).tell(Again.AGAIN)

    def expire(self, name: str, slot: Slot, waiter: Waiter, now: float) -> None:
        """Say to one that its time is over; or have it look once more, where nobody has asked since it came."""
        queue = self._queues[name]
        if queue.asked_at > waiter.came_at:
            slot.tell(TooManyWaiters.TOO_MANY)
        else:
            queue.asked_at = now
            slot.tell(Again.AGAIN)


class Looking:
    """Those who got up to look, and may sit down again: each keeps its slot meanwhile. It locks nothing.

    Else, where all look at once, as many again would come in. Whoever ends without a word is forgotten with its call,
    and at the latest when its time is over.
    """

    def __init__(self) -> None:
        """Nobody looks."""
        self._names: WeakKeyDictionary[Waiter, str] = WeakKeyDictionary()

    def add(self, waiter: Waiter, name: str) -> None:
        """Keep a slot for one who looks after a key."""
        self._names[waiter] = name

    def discard(self, waiter: Waiter) -> None:
        """Keep none any longer: it sits, or waits no more."""
        self._names.pop(waiter, None)

    def names(self, now: float) -> list[str]:
        """Return the key of each of them."""
        return [name for waiter, name in self._names.items() if not waiter.is_over and now < (waiter.deadline or now)]


def most(command: Wait, usual: int) -> int:
    """Return how many may wait at once in this process."""
    return usual if command.max_waiters is None else command.max_waiters
