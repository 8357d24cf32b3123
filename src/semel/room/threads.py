"""The waiters of one process of threads. A thread can't tell that its client has gone: it waits for its time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta

from semel.core.commands import Again
from semel.core.handler import NoRoom, Wait
from semel.core.hint import hint_of
from semel.core.record import Found
from semel.errors import Interrupted
from semel.room.seats import POLL_INTERVAL, Gone, Listen, Lookers, Seat, Seats, Told, Visit, most
from semel.stores.forks import start_afresh_in_children

#: How many wait at once unless the policy says: each takes a thread away from those who have work to do.
MAX_THREADS = 4


class _Chair(Seat):
    """Where a thread waits."""

    __slots__ = ("told", "woken")

    def __init__(self) -> None:
        self.told: Told | Gone | None = None
        self.woken = threading.Event()

    def tell(self, told: Told | Gone) -> None:
        self.told = self.told or told
        self.woken.set()


class Room:
    """Where threads wait."""

    _mutex: threading.Lock
    _seats: Seats
    _lookers: Lookers

    def __init__(self, listen: Listen, *, poll: timedelta = POLL_INTERVAL) -> None:
        """Hear of operations that end elsewhere through *listen*, which is told so again and again."""
        self._listen = listen
        self._poll = poll.total_seconds()
        self._others: list[Callable[[str], None]] = []
        self.start_afresh()
        start_afresh_in_children(self)

    def start_afresh(self) -> None:
        """Have nobody wait."""
        self._mutex = threading.Lock()
        self._seats = Seats()
        self._lookers = Lookers()

    @property
    def count(self) -> int:
        """How many wait."""
        return self._seats.count

    def wait(self, command: Wait, visit: Visit) -> Told:
        """Wait until *visit* is told something; at its first time there may be no room."""
        name, chair = hint_of(command.scope, command.key), _Chair()
        with self._mutex:
            now = time.monotonic()
            if visit.deadline is None:
                if not self._has_room(name, command, now):
                    return NoRoom.NO_ROOM
                visit.begin(now, command.patience)
            was_empty = not self._seats.count
            self._lookers.discard(visit)
            self._seats.take(name, chair, now)
        visit.seat = chair
        told: Told | Gone = Gone.GONE
        try:
            if was_empty:
                # Each time: a store that was closed meanwhile has forgotten us.
                self._listen(self._hear)
            told = self._sit(name, chair, visit)
        finally:
            visit.seat = None
            with self._mutex:
                self._seats.leave(name, chair)
                self._nudge(name)
                if isinstance(told, Again):
                    self._lookers.add(visit, name)
        if isinstance(told, Gone):
            raise Interrupted
        return told

    def end(self, visit: Visit) -> None:
        """Keep no place for *visit* any longer, which has found what it waited for."""
        if visit.deadline is not None:
            with self._mutex:
                self._lookers.discard(visit)

    def announce(self, scope: str, key: str, found: Found) -> None:
        """Tell all who wait for a key what was found of it."""
        if self._seats.count:
            with self._mutex:
                for seat in self._seats.all(hint_of(scope, key)):
                    seat.tell(found)

    def hint(self, scope: str, key: str) -> None:
        """Say that an operation has ended here: whoever waits first may look."""
        if self._seats.count or self._others:
            self._hear(hint_of(scope, key))

    def overhear(self, on_end: Callable[[str], None]) -> None:
        """Have *on_end* hear all that this room hears, in whatever thread that is."""
        with self._mutex:
            if on_end not in self._others:
                self._others.append(on_end)
        self._listen(self._hear)

    def _has_room(self, name: str, command: Wait, now: float) -> bool:
        seats, looking = self._seats, self._lookers.names(now)
        in_all, for_key = seats.count + len(looking), seats.count_of(name) + looking.count(name)
        return in_all < most(command, MAX_THREADS) and for_key < command.max_waiters_per_key

    def _hear(self, name: str) -> None:
        with self._mutex:
            self._seats.send(name, time.monotonic())
        for on_end in self._others:
            on_end(name)

    def _sit(self, name: str, chair: _Chair, visit: Visit) -> Told | Gone:
        while True:
            with self._mutex:
                left = self._look_round(name, chair, visit)
                if chair.told is not None:
                    return chair.told
                chair.woken.clear()
            chair.woken.wait(left)

    def _look_round(self, name: str, chair: _Chair, visit: Visit) -> float:
        """See whether it is this one's turn, or too late; return how long it may sleep before it has to see again."""
        if visit.is_over:
            chair.tell(Gone.GONE)
        now, deadline = time.monotonic(), visit.deadline or 0.0
        next_look = self._seats.asked_at(name) + self._poll
        is_first = self._seats.first(name) is chair
        if chair.told is None and now >= deadline:
            self._seats.expire(name, chair, visit, now)
        elif chair.told is None and is_first and now >= next_look:
            self._seats.send(name, now)
        return (min(deadline, next_look) if is_first else deadline) - now

    def _nudge(self, name: str) -> None:
        """Wake whoever is first now: the next look is its own."""
        first = self._seats.first(name)
        if isinstance(first, _Chair):
            first.woken.set()
