"""Keeps leases alive: one batched renewal per process and interval, however many requests are in flight.

Whoever has lost its hold is told, so that it can stop: when a renewal finds it so, or at once where the store can say
that all are lost (``Store.watch``). That it can store nothing is the fence's doing, not this file's.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import timedelta

from semel.core.commands import Renew
from semel.core.record import Hold
from semel.stores.forks import start_afresh_in_children

#: Two renewals may fail before a live worker loses its lease.
RENEWALS_PER_LEASE = 3

OnLost = Callable[[], None]
#: Begins to call back when all that is held is lost.
Watch = Callable[[OnLost], None]
Leases = dict[Hold, tuple[timedelta, OnLost]]


def ignore() -> None:
    """Do nothing about a lost hold: its worker will find out when it wants to store something."""


_logger = logging.getLogger("semel")


class AsyncKeeper:
    """The leases of one event loop, renewed by a timer that runs only while there are any."""

    def __init__(self, renew: Callable[[Renew], Awaitable[frozenset[Hold]]], watch: Watch | None = None) -> None:
        """Renew through *renew*; hear through *watch* that all is lost."""
        self._renew = renew
        self._leases: Leases = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._wound_for = timedelta.max
        self._round: asyncio.Task[None] | None = None
        if watch is not None:
            watch(self.lose_all)

    def add(self, hold: Hold, lease: timedelta, on_lost: OnLost = ignore) -> None:
        """Keep *hold* alive from now on; call *on_lost* when somebody else has it."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            # The loop these were renewed on is gone, and their handlers with it.
            self._loop, self._timer = loop, None
            self._leases.clear()
        self._leases[hold] = lease, on_lost
        if self._timer is None or lease < self._wound_for:
            self._wind(loop, lease)

    def discard(self, hold: Hold) -> None:
        """Leave *hold* to its lease."""
        self._leases.pop(hold, None)

    def lose_all(self) -> None:
        """Tell all that they have lost their hold, on their loop. This may be called in any thread."""
        loop = self._loop
        if loop is not None:
            with suppress(RuntimeError):  # It has ended, and the handlers with it.
                loop.call_soon_threadsafe(self._lose_all)

    def close(self) -> None:
        """Renew no more."""
        self._leases.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _lose_all(self) -> None:
        leases, self._leases = self._leases, {}
        for _, on_lost in leases.values():
            on_lost()

    def _wind(self, loop: asyncio.AbstractEventLoop, lease: timedelta) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_later(_interval(lease), self._start_round)
        self._wound_for = lease

    def _start_round(self) -> None:
        self._timer = None
        if self._leases:
            # Both now: by the time a task begins, the last lease may be gone.
            self._wind(asyncio.get_running_loop(), min(lease for lease, _ in self._leases.values()))
            self._round = asyncio.ensure_future(self._renew_all(_held(self._leases)))

    async def _renew_all(self, holds: tuple[tuple[Hold, timedelta], ...]) -> None:
        try:
            lost = await self._renew(Renew(holds))
        except Exception as error:  # noqa: BLE001 - whatever it was, the timer is wound and the next round tries again
            _tell(error)
            return
        for hold in lost:
            # It may have ended meanwhile, and its renewal found it so.
            _, on_lost = self._leases.pop(hold, (None, ignore))
            on_lost()


class Keeper:
    """The leases of one process of threads, renewed by one daemon thread."""

    _leases: Leases
    _changed: threading.Condition
    _thread: threading.Thread | None

    def __init__(self, renew: Callable[[Renew], frozenset[Hold]], watch: Watch | None = None) -> None:
        """Renew through *renew*; hear through *watch* that all is lost."""
        self._renew = renew
        self.start_afresh()
        start_afresh_in_children(self)
        if watch is not None:
            watch(self.lose_all)

    def add(self, hold: Hold, lease: timedelta, on_lost: OnLost = ignore) -> None:
        """Keep *hold* alive from now on; call *on_lost*, in a thread that is not the caller's, when it is lost."""
        interval = _interval(lease)
        with self._changed:
            self._leases[hold] = lease, on_lost
            if self._thread is None:
                self._interval = interval
                self._thread = threading.Thread(target=self._renew_for_ever, name="semel-keeper", daemon=True)
                self._thread.start()
            elif interval < self._interval:
                self._interval = interval
                self._changed.notify()

    def discard(self, hold: Hold) -> None:
        """Leave *hold* to its lease."""
        with self._changed:
            self._leases.pop(hold, None)

    def lose_all(self) -> None:
        """Tell all that they have lost their hold, in the calling thread."""
        with self._changed:
            leases, self._leases = self._leases, {}
        for _, on_lost in leases.values():
            on_lost()

    def close(self) -> None:
        """Renew no more."""
        with self._changed:
            self._leases.clear()
            thread, self._thread = self._thread, None
            self._changed.notify()
        if thread is not None:
            thread.join()

    def start_afresh(self) -> None:
        """Hold nothing, and have no thread."""
        self._leases = {}
        self._interval = 0.0
        self._changed = threading.Condition()
        self._thread = None

    def _renew_for_ever(self) -> None:
        changed, thread = self._changed, threading.current_thread()
        while True:
            with changed:
                # It may have been closed before this thread came to wait: nobody would wake it then.
                woken = self._thread is thread and changed.wait(self._interval)
                if self._thread is not thread:
                    return
                holds = () if woken else _held(self._leases)
            if holds:
                self._renew_once(holds)

    def _renew_once(self, holds: tuple[tuple[Hold, timedelta], ...]) -> None:
        try:
            lost = self._renew(Renew(holds))
        except Exception as error:  # noqa: BLE001 - whatever it was, the thread must live to try again
            _tell(error)
            return
        for hold in lost:
            with self._changed:
                _, on_lost = self._leases.pop(hold, (None, ignore))
            on_lost()


def _held(leases: Leases) -> tuple[tuple[Hold, timedelta], ...]:
    return tuple((hold, lease) for hold, (lease, _) in leases.items())


def _tell(error: Exception) -> None:
    _logger.warning("Leases could not be renewed; the next round tries again: %s", error)


def _interval(lease: timedelta) -> float:
    return lease.total_seconds() / RENEWALS_PER_LEASE
