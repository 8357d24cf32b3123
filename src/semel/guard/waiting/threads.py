"""The waiting threads of one process. A thread can't tell that its client has gone: it waits until its time is over."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta

from semel.core.commands import Again
from semel.core.handler import TooManyWaiters, Wait
from semel.core.hint import hint_of
from semel.core.record import Found
from semel.errors import Interrupted
from semel.guard.waiting.queue import POLL_INTERVAL, Gone, Listen, Looking, Queues, Slot, Told, Waiter, most
from semel.stores.forks import start_afresh_in_children

#: How many wait at once if the policy does not say: each occupies a thread that could serve other requests.
MAX_THREADS = 4


class _ThreadSlot(Slot):
    """The slot of one waiting thread."""

    __slots__ = ("told", "woken")

    def __init__(self) -> None:
        self.told: Told | Gone | None = None
        self.woken = threading.Event()

    def tell(self, told: Told | Gone) -> None:
        self.told = self.told or told
        self.woken.set()


class Waiters:
    """The waiting threads of this process."""

    _mutex: threading.Lock
    _queues: Queues
    _looking: Looking

    def __init__(self, listen: Listen, *, poll: timedelta = POLL_INTERVAL) -> None:
        """Get hints of operations that end elsewhere through *listen*, which is called again for each first waiter."""
        self._listen = listen
        self._poll = poll.total_seconds()
        self._others: list[Callable[[str], None]] = []
        self.start_afresh()
        start_afresh_in_children(self)

    def start_afresh(self) -> None:
        """Start with no waiters."""
        self._mutex = threading.Lock()
        self._queues = Queues()
        self._looking = Looking()

    @property
    def count(self) -> int:
        """The number of waiters."""
        return self._queues.count

    def wait(self, command: Wait, waiter: Waiter) -> Told:
        """Wait until *waiter* gets a result. The first wait of a call is refused if too many wait already."""
        name, slot = hint_of(command.scope, command.key), _ThreadSlot()
        with self._mutex:
            now = time.monotonic()
            if waiter.deadline is None:
                if not self._has_room(name, command, now):
                    return TooManyWaiters.TOO_MANY
                waiter.begin(now, command.patience)
            was_empty = not self._queues.count
            self._looking.discard(waiter)
            self._queues.take(name, slot, now)
        waiter.slot = slot
        told: Told | Gone = Gone.GONE
        try:
            if was_empty:
                # Each time: a store that was closed meanwhile has dropped the callback.
                self._listen(self._hear)
            told = self._wait(name, slot, waiter)
        finally:
            waiter.slot = None
            with self._mutex:
                self._queues.leave(name, slot)
                self._nudge(name)
                if isinstance(told, Again):
                    self._looking.add(waiter, name)
        if isinstance(told, Gone):
            raise Interrupted
        return told

    def end(self, waiter: Waiter) -> None:
        """Free the slot of *waiter*, which does not wait any more."""
        if waiter.deadline is not None:
            with self._mutex:
                self._looking.discard(waiter)

    def announce(self, scope: str, key: str, found: Found) -> None:
        """Give *found* to all waiters for a key."""
        if self._queues.count:
            with self._mutex:
                for slot in self._queues.all(hint_of(scope, key)):
                    slot.tell(found)

    def hint(self, scope: str, key: str) -> None:
        """An operation has ended in this process: let the first waiter for its key ask the store."""
        if self._queues.count or self._others:
            self._hear(hint_of(scope, key))

    def overhear(self, on_end: Callable[[str], None]) -> None:
        """Call *on_end* for every hint that arrives here, in any thread."""
        with self._mutex:
            if on_end not in self._others:
                self._others.append(on_end)
        self._listen(self._hear)

    def _has_room(self, name: str, command: Wait, now: float) -> bool:
        queues, looking = self._queues, self._looking.names(now)
        in_all, for_key = queues.count + len(looking), queues.count_of(name) + looking.count(name)
        return in_all < most(command, MAX_THREADS) and for_key < command.max_waiters_per_key

    def _hear(self, name: str) -> None:
        with self._mutex:
            self._queues.send(name, time.monotonic())
        for on_end in self._others:
            on_end(name)

    def _wait(self, name: str, slot: _ThreadSlot, waiter: Waiter) -> Told | Gone:
        while True:
            with self._mutex:
                left = self._look_round(name, slot, waiter)
                if slot.told is not None:
                    return slot.told
                slot.woken.clear()
            slot.woken.wait(left)

    def _look_round(self, name: str, slot: _ThreadSlot, waiter: Waiter) -> float:
        """Check whether this waiter's turn or deadline has come; return how long it may sleep before the next check."""
        if waiter.is_over:
            slot.tell(Gone.GONE)
        now, deadline = time.monotonic(), waiter.deadline or 0.0
        next_look = self._queues.asked_at(name) + self._poll
        is_first = self._queues.first(name) is slot
        if slot.told is None and now >= deadline:
            self._queues.expire(name, slot, waiter, now)
        elif slot.told is None and is_first and now >= next_look:
            self._queues.send(name, now)
        return (min(deadline, next_look) if is_first else deadline) - now

    def _nudge(self, name: str) -> None:
        """Wake the first waiter: it asks the store next."""
        first = self._queues.first(name)
        if isinstance(first, _ThreadSlot):
            first.woken.set()
