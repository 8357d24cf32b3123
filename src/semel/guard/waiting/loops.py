"""The waiters of a process's event loops: one loop as a rule, and under some frameworks one for each request."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from datetime import timedelta
from weakref import WeakKeyDictionary

from semel.core.commands import Again
from semel.core.handler import TooManyWaiters, Wait
from semel.core.hint import hint_of
from semel.core.record import Found
from semel.errors import Interrupted
from semel.guard.waiting.queue import POLL_INTERVAL, Gone, Listen, Looking, Queues, Slot, Told, Waiter, most
from semel.stores.forks import start_afresh_in_children

#: How many wait at once if the policy does not say: each is a task or two, a few kilobytes in all.
MAX_WAITERS = 1000

_Loop = asyncio.AbstractEventLoop


class _TaskSlot(Slot):
    """The slot of one waiting task."""

    __slots__ = ("future",)

    def __init__(self, loop: _Loop) -> None:
        self.future: asyncio.Future[Told | Gone] = loop.create_future()

    def tell(self, told: Told | Gone) -> None:
        if not self.future.done():
            self.future.set_result(told)


class _LoopWaiters:
    """The waiters of one loop. The poll timer runs only while there are waiters."""

    def __init__(self, poll: float) -> None:
        # It keeps no reference to its loop: the loop could not be collected otherwise.
        self.queues = Queues()
        self._poll = poll
        self._timer: asyncio.TimerHandle | None = None

    async def wait(self, name: str, waiter: Waiter, now: float) -> Told | Gone:
        loop = asyncio.get_running_loop()
        slot = waiter.slot = _TaskSlot(loop)
        if waiter.is_over:
            return Gone.GONE
        self.queues.take(name, slot, now)
        end = loop.call_at(waiter.deadline or now, self._expire, name, slot, waiter)
        if self._timer is None:
            self._timer = loop.call_later(self._poll, self._send_all)
        try:
            return await slot.future
        finally:
            end.cancel()
            waiter.slot = None
            self.queues.leave(name, slot)
            if not self.queues.count and self._timer is not None:
                # A timer keeps a reference to its loop.
                self._timer.cancel()
                self._timer = None

    def hear(self, name: str) -> None:
        self.queues.send(name, asyncio.get_running_loop().time())

    def _expire(self, name: str, slot: _TaskSlot, waiter: Waiter) -> None:
        if not slot.future.done():
            self.queues.expire(name, slot, waiter, asyncio.get_running_loop().time())

    def _send_all(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._poll, self._send_all) if self.queues.count else None
        # All in one turn of the loop, so that their reads become one statement.
        for name in self.queues.names():
            self.queues.send(name, loop.time())


class AsyncWaiters:
    """The waiting tasks of this process."""

    _mutex: threading.RLock
    _by_loop: WeakKeyDictionary[_Loop, _LoopWaiters]
    _looking: Looking
    #: One object per waiter. Every request that ends checks whether there are any, so it is read without a lock.
    _waiting: set[object]

    def __init__(self, listen: Listen, *, poll: timedelta = POLL_INTERVAL) -> None:
        """Get hints of operations that end elsewhere through *listen*, which is called again for each first waiter."""
        self._listen = listen
        self._poll = poll.total_seconds()
        self.start_afresh()
        start_afresh_in_children(self)

    def start_afresh(self) -> None:
        """Start with no waiters."""
        # Reentrant: the garbage collector may end a request of a closed loop while this lock is held.
        self._mutex = threading.RLock()
        self._by_loop = WeakKeyDictionary()
        self._looking = Looking()
        self._waiting = set()

    @property
    def count(self) -> int:
        """The number of waiters, on all loops."""
        return sum(waiters.queues.count for _, waiters in self._all())

    async def wait(self, command: Wait, waiter: Waiter) -> Told:
        """Wait until *waiter* gets a result. The first wait of a call is refused if too many wait already."""
        loop = asyncio.get_running_loop()
        name, now = hint_of(command.scope, command.key), loop.time()
        if waiter.deadline is None:
            if not self._has_room(name, command, now):
                return TooManyWaiters.TOO_MANY
            waiter.begin(now, command.patience)
        waiters = self._waiters_on(loop)
        if not waiters.queues.count:
            # Each time: a store that was closed meanwhile has dropped the callback.
            self._listen(self.hear)
        with self._mutex:
            self._looking.discard(waiter)
        told = await self._wait(waiters, name, waiter, now)
        if isinstance(told, Gone):
            raise Interrupted
        if isinstance(told, Again):
            with self._mutex:
                self._looking.add(waiter, name)
        return told

    def end(self, waiter: Waiter) -> None:
        """Free the slot of *waiter*, which does not wait any more."""
        if waiter.deadline is not None:
            with self._mutex:
                self._looking.discard(waiter)

    def announce(self, scope: str, key: str, found: Found) -> None:
        """Give *found* to all waiters for a key on this loop. Waiters on other loops have had the same hint."""
        waiters = self._by_loop.get(asyncio.get_running_loop())
        if waiters is not None and waiters.queues.count:
            for slot in waiters.queues.all(hint_of(scope, key)):
                slot.tell(found)

    def hint(self, scope: str, key: str) -> None:
        """An operation has ended in this process: let the first waiter for its key ask the store."""
        if self._waiting:
            self.hear(hint_of(scope, key))

    def hear(self, name: str) -> None:
        """Handle a hint, in any thread."""
        here = _this_loop()
        for loop, waiters in self._all():
            if loop is here:
                waiters.hear(name)
            elif waiters.queues.count:
                with suppress(RuntimeError):  # The loop is closed.
                    loop.call_soon_threadsafe(waiters.hear, name)

    async def _wait(self, waiters: _LoopWaiters, name: str, waiter: Waiter, now: float) -> Told | Gone:
        waiting, one = self._waiting, object()
        waiting.add(one)
        try:
            return await waiters.wait(name, waiter, now)
        finally:
            waiting.discard(one)

    def _has_room(self, name: str, command: Wait, now: float) -> bool:
        all_waiters = self._all()
        with self._mutex:
            looking = self._looking.names(now)
        in_all = len(looking) + sum(waiters.queues.count for _, waiters in all_waiters)
        for_key = looking.count(name) + sum(waiters.queues.count_of(name) for _, waiters in all_waiters)
        return in_all < most(command, MAX_WAITERS) and for_key < command.max_waiters_per_key

    def _waiters_on(self, loop: _Loop) -> _LoopWaiters:
        waiters = self._by_loop.get(loop)
        if waiters is None:
            with self._mutex:
                # A loop that was closed while requests waited has no waiters any more.
                for each in [each for each in self._by_loop if each.is_closed()]:
                    del self._by_loop[each]
                waiters = self._by_loop[loop] = _LoopWaiters(self._poll)
        return waiters

    def _all(self) -> list[tuple[_Loop, _LoopWaiters]]:
        with self._mutex:
            return list(self._by_loop.items())


def _this_loop() -> _Loop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
