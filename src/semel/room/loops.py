"""The waiters of a process's event loops: one loop as a rule, and under some frameworks one for each request."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from datetime import timedelta
from weakref import WeakKeyDictionary

from semel.core.commands import Again
from semel.core.handler import NoRoom, Wait
from semel.core.hint import hint_of
from semel.core.record import Found
from semel.errors import Interrupted
from semel.room.seats import POLL_INTERVAL, Gone, Listen, Lookers, Seat, Seats, Told, Visit, most
from semel.stores.forks import start_afresh_in_children

#: How many wait at once unless the policy says: each is a task or two, a few kilobytes in all.
MAX_WAITERS = 1000

_Loop = asyncio.AbstractEventLoop


class _Place(Seat):
    """Where a task waits."""

    __slots__ = ("future",)

    def __init__(self, loop: _Loop) -> None:
        self.future: asyncio.Future[Told | Gone] = loop.create_future()

    def tell(self, told: Told | Gone) -> None:
        if not self.future.done():
            self.future.set_result(told)


class _Bench:
    """The waiters of one loop. The timer that has them ask runs only while there are any."""

    def __init__(self, poll: float) -> None:
        # It does not hold its loop, which would never be collected then.
        self.seats = Seats()
        self._poll = poll
        self._timer: asyncio.TimerHandle | None = None

    async def sit(self, name: str, visit: Visit, now: float) -> Told | Gone:
        loop = asyncio.get_running_loop()
        place = visit.seat = _Place(loop)
        if visit.is_over:
            return Gone.GONE
        self.seats.take(name, place, now)
        end = loop.call_at(visit.deadline or now, self._expire, name, place, visit)
        if self._timer is None:
            self._timer = loop.call_later(self._poll, self._send_all)
        try:
            return await place.future
        finally:
            end.cancel()
            visit.seat = None
            self.seats.leave(name, place)
            if not self.seats.count and self._timer is not None:
                # A timer holds its loop.
                self._timer.cancel()
                self._timer = None

    def hear(self, name: str) -> None:
        self.seats.send(name, asyncio.get_running_loop().time())

    def _expire(self, name: str, place: _Place, visit: Visit) -> None:
        if not place.future.done():
            self.seats.expire(name, place, visit, asyncio.get_running_loop().time())

    def _send_all(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._poll, self._send_all) if self.seats.count else None
        # All in one turn of the loop, so that what they ask goes out as one statement.
        for name in self.seats.names():
            self.seats.send(name, loop.time())


class AsyncRoom:
    """Where tasks wait."""

    _mutex: threading.RLock
    _benches: WeakKeyDictionary[_Loop, _Bench]
    _lookers: Lookers
    #: One thing for each who waits. Every request that ends asks whether there are any, so that takes no lock.
    _sitting: set[object]

    def __init__(self, listen: Listen, *, poll: timedelta = POLL_INTERVAL) -> None:
        """Hear of operations that end elsewhere through *listen*, which is told so again and again."""
        self._listen = listen
        self._poll = poll.total_seconds()
        self.start_afresh()
        start_afresh_in_children(self)

    def start_afresh(self) -> None:
        """Have nobody wait."""
        # One that may be taken twice: the garbage collector may end a request in here, whose loop was ended before.
        self._mutex = threading.RLock()
        self._benches = WeakKeyDictionary()
        self._lookers = Lookers()
        self._sitting = set()

    @property
    def count(self) -> int:
        """How many wait, on all loops."""
        return sum(bench.seats.count for _, bench in self._all())

    async def wait(self, command: Wait, visit: Visit) -> Told:
        """Wait until *visit* is told something; at its first time there may be no room."""
        loop = asyncio.get_running_loop()
        name, now = hint_of(command.scope, command.key), loop.time()
        if visit.deadline is None:
            if not self._has_room(name, command, now):
                return NoRoom.NO_ROOM
            visit.begin(now, command.patience)
        bench = self._bench_on(loop)
        if not bench.seats.count:
            # Each time: a store that was closed meanwhile has forgotten us.
            self._listen(self.hear)
        with self._mutex:
            self._lookers.discard(visit)
        told = await self._sit(bench, name, visit, now)
        if isinstance(told, Gone):
            raise Interrupted
        if isinstance(told, Again):
            with self._mutex:
                self._lookers.add(visit, name)
        return told

    def end(self, visit: Visit) -> None:
        """Keep no place for *visit* any longer, which has found what it waited for."""
        if visit.deadline is not None:
            with self._mutex:
                self._lookers.discard(visit)

    def announce(self, scope: str, key: str, found: Found) -> None:
        """Tell all who wait for a key on this loop what was found of it. Those on others have had the same hint."""
        bench = self._benches.get(asyncio.get_running_loop())
        if bench is not None and bench.seats.count:
            for seat in bench.seats.all(hint_of(scope, key)):
                seat.tell(found)

    def hint(self, scope: str, key: str) -> None:
        """Say that an operation has ended here: whoever waits first may look."""
        if self._sitting:
            self.hear(hint_of(scope, key))

    def hear(self, name: str) -> None:
        """Take a hint from anywhere, in any thread."""
        here = _this_loop()
        for loop, bench in self._all():
            if loop is here:
                bench.hear(name)
            elif bench.seats.count:
                with suppress(RuntimeError):  # It has ended.
                    loop.call_soon_threadsafe(bench.hear, name)

    async def _sit(self, bench: _Bench, name: str, visit: Visit, now: float) -> Told | Gone:
        sitting, one = self._sitting, object()
        sitting.add(one)
        try:
            return await bench.sit(name, visit, now)
        finally:
            sitting.discard(one)

    def _has_room(self, name: str, command: Wait, now: float) -> bool:
        benches = self._all()
        with self._mutex:
            looking = self._lookers.names(now)
        in_all = len(looking) + sum(bench.seats.count for _, bench in benches)
        for_key = looking.count(name) + sum(bench.seats.count_of(name) for _, bench in benches)
        return in_all < most(command, MAX_WAITERS) and for_key < command.max_waiters_per_key

    def _bench_on(self, loop: _Loop) -> _Bench:
        bench = self._benches.get(loop)
        if bench is None:
            with self._mutex:
                # Whoever waited on a loop that was ended in the middle waits no more.
                for each in [each for each in self._benches if each.is_closed()]:
                    del self._benches[each]
                bench = self._benches[loop] = _Bench(self._poll)
        return bench

    def _all(self) -> list[tuple[_Loop, _Bench]]:
        with self._mutex:
            return list(self._benches.items())


def _this_loop() -> _Loop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
