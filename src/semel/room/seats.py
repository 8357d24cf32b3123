"""Who waits for which key, in the order in which they came, and when one of them asked last. Nothing here waits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from weakref import WeakKeyDictionary

from semel.core.commands import Again
from semel.core.handler import NoRoom, Wait
from semel.core.record import Found

#: How often the store is asked about a key: a person does not notice, and neither does the database.
POLL_INTERVAL = timedelta(seconds=1)

Told = Found | Again | NoRoom
#: Begins to call back with the names of operations that end (``core/hint.py``), in whatever process.
Listen = Callable[[Callable[[str], None]], None]


class Gone(Enum):
    """Nobody is there any more who wants to be told anything."""

    GONE = "gone"


class Seat(ABC):
    """Where one waits, until it is told something."""

    __slots__ = ("__weakref__",)

    @abstractmethod
    def tell(self, told: Told | Gone) -> None:
        """Say it. What was said before counts, and this does not."""


class Visit:
    """One call's stay, over all the times that it sits down, looks, and sits down again."""

    __slots__ = ("__weakref__", "came_at", "deadline", "is_over", "seat")

    def __init__(self) -> None:
        """It has not come yet, and may never."""
        self.came_at = 0.0
        #: Until when it waits, once it does.
        self.deadline: float | None = None
        self.seat: Seat | None = None
        #: Nobody is there any more to be answered.
        self.is_over = False

    def begin(self, now: float, patience: timedelta) -> None:
        """Count the time from here."""
        self.came_at, self.deadline = now, now + patience.total_seconds()

    def leave(self) -> None:
        """Wait no longer, now or later: ``Interrupted`` is raised to whoever does. On a loop, only from that loop."""
        self.is_over = True
        # After that, never before: whoever sits down looks at the two in the other order.
        seat = self.seat
        if seat is not None:
            seat.tell(Gone.GONE)


@dataclass(slots=True)
class _Line:
    """Those who wait for one key."""

    #: When one of them asked last, or was sent to. The first of them had asked before it sat down.
    asked_at: float
    seats: dict[Seat, None] = field(default_factory=dict)


class Seats:
    """All who wait in one place. It locks nothing."""

    def __init__(self) -> None:
        """Nobody waits."""
        self._lines: dict[str, _Line] = {}
        self.count = 0

    def count_of(self, name: str) -> int:
        """Return how many wait for one key."""
        line = self._lines.get(name)
        return len(line.seats) if line else 0

    def take(self, name: str, seat: Seat, now: float) -> None:
        """Sit down behind the others."""
        line = self._lines.get(name)
        if line is None:
            line = self._lines[name] = _Line(now)
        line.seats[seat] = None
        self.count += 1

    def leave(self, name: str, seat: Seat) -> None:
        """Get up."""
        line = self._lines[name]
        del line.seats[seat]
        self.count -= 1
        if not line.seats:
            del self._lines[name]

    def first(self, name: str) -> Seat | None:
        """Return who has waited longest for a key, since it asked."""
        line = self._lines.get(name)
        return next(iter(line.seats)) if line else None

    def all(self, name: str) -> tuple[Seat, ...]:
        """Return all who wait for a key."""
        line = self._lines.get(name)
        return tuple(line.seats) if line else ()

    def names(self) -> tuple[str, ...]:
        """Return the keys that somebody waits for."""
        return tuple(self._lines)

    def asked_at(self, name: str) -> float:
        """Return when one of those who wait for a key asked last. There are some."""
        return self._lines[name].asked_at

    def send(self, name: str, now: float) -> None:
        """Have the first of those who wait for a key ask the store."""
        line = self._lines.get(name)
        if line is not None:
            line.asked_at = now
            next(iter(line.seats)).tell(Again.AGAIN)

    def expire(self, name: str, seat: Seat, visit: Visit, now: float) -> None:
        """Say to one that its time is over; or have it look once more, where nobody has asked since it came."""
        line = self._lines[name]
        if line.asked_at > visit.came_at:
            seat.tell(NoRoom.NO_ROOM)
        else:
            line.asked_at = now
            seat.tell(Again.AGAIN)


class Lookers:
    """Those who got up to look, and may sit down again: each keeps its place meanwhile. It locks nothing.

    Else, where all look at once, as many again would come in. Whoever ends without a word is forgotten with its call,
    and at the latest when its time is over.
    """

    def __init__(self) -> None:
        """Nobody looks."""
        self._names: WeakKeyDictionary[Visit, str] = WeakKeyDictionary()

    def add(self, visit: Visit, name: str) -> None:
        """Keep a place for one who looks after a key."""
        self._names[visit] = name

    def discard(self, visit: Visit) -> None:
        """Keep none any longer: it sits, or waits no more."""
        self._names.pop(visit, None)

    def names(self, now: float) -> list[str]:
        """Return the key of each of them."""
        return [name for visit, name in self._names.items() if not visit.is_over and now < (visit.deadline or now)]


def most(command: Wait, usual: int) -> int:
    """Return how many may wait at once in this process."""
    return usual if command.max_waiters is None else command.max_waiters
