"""Keeps leases alive: one batched renewal per process and interval, however many requests are in flight.

It is done by a thread, for event loops as well: a handler that blocks its loop must not cost every other operation of
its process its lease. But a lease must end when its worker can't go on, so leases that belong to a loop are renewed
only while the loop shows life (``Pulse``).

A worker that has lost its hold is told, so that it can stop: when a renewal finds it so, or at once where the store can
say that all are lost (``Store.watch``). That it can store nothing is the fence's doing, not this file's.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

from semel.core.commands import Renew
from semel.core.record import Hold
from semel.stores import greenlets
from semel.stores.forks import start_afresh_in_children

#: Two renewals may fail before a live worker loses its lease.
RENEWALS_PER_LEASE = 3

#: An event loop that shows no life for this long is taken for dead, and its leases are left to end: so long, or so many
#: of their leases, whichever is longer. Too short, and an operation takes effect twice since a handler beside it blocks
#: its loop; too long, and the keys of a loop that hangs for good are busy for longer. The first is worse, so it is as
#: long as the servers and proxies in front of an app usually wait for an answer: a client that is still there is rare
#: after that.
LOOP_SILENCE = timedelta(seconds=60)
LOOP_SILENCE_LEASES = 10

#: A store that is away is asked again so soon. When it is back, leases that ran out meanwhile must be renewed before
#: another process takes their keys over: their handlers still run, or their answers wait.
RETRY_SECONDS = 1.0
#: Keys whose leases ran out while the store was away are taken over so long after this process has seen it again: every
#: worker that lives has tried to renew by then, and a retry has lost no more than this.
GRACE_SECONDS = 3 * RETRY_SECONDS

#: How long a thread without leases waits for the next one before it ends. To start another costs 0.1 ms.
IDLE_SECONDS = 10.0
#: The thread is waited for where it is closed, but no loop may be held up by a renewal that a store does not answer.
CLOSE_SECONDS = 1.0

OnLost = Callable[[], None]
RenewHolds = Callable[[Renew], frozenset[Hold]]
#: Begins to call back when all that is held is lost.
Watch = Callable[[OnLost], None]


def ignore() -> None:
    """Do nothing about a lost hold: its worker will find out when it wants to store something."""


_logger = logging.getLogger("semel")


class Pulse:
    """What the thread knows of an event loop: whether it can go on with its handlers."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_revival: Callable[[], None]) -> None:
        """*loop* shows life now. Call *on_revival* on it when it does so again after it was taken for dead."""
        self.loop = loop
        self._on_revival = on_revival
        self._beat_at = time.monotonic()
        self._is_asked = self._was_dead = False

    def beat(self) -> None:
        """Show life. It is called on the loop."""
        self._beat_at = time.monotonic()

    def ask(self) -> None:
        """Have the loop show life, once it can. It costs a live loop one callback."""
        if not self._is_asked:
            self._is_asked = True
            with suppress(RuntimeError):  # It has ended since it was looked at.
                self.loop.call_soon_threadsafe(self._answer)

    def is_alive(self, lease: timedelta) -> bool:
        """Whether a handler with such a lease is to be taken for alive."""
        if not self.loop.is_running():
            return False
        silence = max(LOOP_SILENCE, LOOP_SILENCE_LEASES * lease)
        if time.monotonic() - self._beat_at <= silence.total_seconds():
            return True
        if not self._was_dead:
            _logger.error("An event loop has shown no life for %s. Its leases are renewed no more.", silence)
        self._was_dead = True
        return False

    def _answer(self) -> None:
        self.beat()
        self._is_asked = False
        if self._was_dead:
            self._was_dead = False
            self._on_revival()


@dataclass(slots=True)
class _Lease:
    hold: Hold
    length: timedelta
    on_lost: OnLost
    #: Of the event loop that its handler runs on; None: it runs in a thread.
    pulse: Pulse | None = None
    #: When the store was last asked and said that it is held, by the process's own clock. A claim that was answered
    #: late is asked about before it is added (``is_late``), so it counts from then.
    confirmed_at: float = -math.inf

    @property
    def has_ended(self) -> bool:
        """Whether its handler is gone without a word."""
        return self.pulse is not None and self.pulse.loop.is_closed()

    @property
    def is_due(self) -> bool:
        """Whether its handler can go on."""
        return self.pulse is None or self.pulse.is_alive(self.length)


class Leases:
    """The leases of the threads of one process, renewed by one daemon thread, which lives while there are any."""

    #: By the token of their claim: a hold as a whole takes longer to look up, and this is done with every request.
    _leases: dict[bytes, _Lease]
    _mutex: threading.Lock
    _changed: threading.Condition
    _thread: threading.Thread | None

    def __init__(
        self, renew: RenewHolds, watch: Watch | None = None, renewals: Callable[[], RenewHolds] | None = None
    ) -> None:
        """Renew through *renew*, which is called in a thread; hear through *watch* that all is lost. Where threads are
        greenlets, the thread renews through what *renewals* returns in it.
        """
        greenlets.check()
        self._renew = renew
        self._renewals = renewals
        self.start_afresh()
        start_afresh_in_children(self)
        if watch is not None:
            watch(self.lose_all)

    def add(self, hold: Hold, lease: timedelta, on_lost: OnLost = ignore) -> None:
        """Keep *hold* alive from now on; call *on_lost*, in a thread that is not the caller's, when it is lost."""
        self._add(_Lease(hold, lease, on_lost))

    def keep(self, hold: Hold, lease: timedelta) -> None:
        """Keep *hold* alive, though its handler has ended: its answer waits for the store, and no loop must show life
        for it. If it is lost, the fence tells.
        """
        self._add(_Lease(hold, lease, ignore))

    def has(self, hold: Hold) -> bool:
        """Whether *hold* is kept alive: what works under it lives, and was not told that it is lost."""
        lease = self._leases.get(hold.token)
        return lease is not None and lease.is_due

    def saw_outage(self) -> None:
        """Take note that the store was away."""
        self._was_away = True

    def is_outage_recent(self) -> bool:
        """Whether the store was away until a moment ago. It has just told of a lease that is over, so it is back."""
        if self._was_away:
            self._was_away, self._back_at = False, time.monotonic()
        return time.monotonic() - self._back_at < GRACE_SECONDS

    def discard(self, hold: Hold) -> None:
        """Leave *hold* to its lease."""
        with self._mutex:
            self._leases.pop(hold.token, None)

    def is_sure(self, hold: Hold) -> bool:
        """Whether no other can have the operation of *hold* at this moment: the store has said within half of its lease
        that it is ours.
        """
        lease = self._leases.get(hold.token)
        return lease is not None and time.monotonic() - lease.confirmed_at <= lease.length.total_seconds() / 2

    def confirm(self, hold: Hold) -> None:
        """Renew *hold* now, and wait for it. A store may pass over a record that is being taken over at this moment, so
        its next fenced write tells whether it is still ours.
        """
        lease = self._leases.get(hold.token)
        if lease is not None:
            self._renew_once([lease], self._renew, is_asked=True)

    def lose_all(self) -> None:
        """Tell all that they have lost their hold: threads in the calling one, and loops on themselves."""
        with self._mutex:
            leases, self._leases = self._leases, {}
        for lease in leases.values():
            lease.on_lost()

    def close(self) -> None:
        """Renew no more."""
        with self._mutex:
            self._leases.clear()
            thread, self._thread = self._thread, None
            self._changed.notify()
        if thread is not None:
            thread.join(CLOSE_SECONDS)

    def start_afresh(self) -> None:
        """Hold nothing, and have no thread."""
        self._leases = {}
        self._interval = IDLE_SECONDS
        self._is_woken = self._has_failed = self._was_away = False
        self._back_at = -math.inf
        # Taken with each request, so it is the lock itself, and not the condition's wrapper around it.
        self._mutex = greenlets.lock()
        self._changed = greenlets.condition(self._mutex)
        self._thread = None

    def _add(self, lease: _Lease) -> None:
        interval = _interval(lease.length)
        lease.confirmed_at = time.monotonic()
        with self._mutex:
            self._leases[lease.hold.token] = lease
            if self._thread is None:
                self._interval = interval
                self._thread = greenlets.start_thread(self._renew_for_ever, "semel-leases")
            elif interval < self._interval:
                self._interval = interval
                self._changed.notify()

    def _wake_up(self) -> None:
        """Have a round now."""
        with self._mutex:
            self._is_woken = True
            self._changed.notify()

    def _renew_for_ever(self, thread: threading.Thread) -> None:
        mutex, changed = self._mutex, self._changed
        is_apart = self._renewals is not None and greenlets.are_used()
        renew = self._renewals() if self._renewals is not None and is_apart else self._renew
        is_idle = False
        due_at = math.inf
        while True:
            with mutex:
                # A shorter lease is due when its own interval is over, and puts off none of those that were there.
                due_at = min(due_at, time.monotonic() + self._interval)
                # It may have been closed, or hurried, before this thread came to wait: nothing would wake it then.
                is_waiting = self._thread is thread and not self._is_woken
                is_woken = is_waiting and changed.wait(due_at - time.monotonic())
                if self._thread is not thread:
                    return
                if is_woken and not self._is_woken:
                    continue  # A shorter lease was added.
                due_at = math.inf
                self._is_woken = False
                for token in [token for token, lease in self._leases.items() if lease.has_ended]:
                    del self._leases[token]
                if not self._leases and is_idle and not is_apart:  # or its connection would be opened again
                    self._thread = None
                    return
                is_idle = not self._leases
                self._interval = min((_interval(each.length) for each in self._leases.values()), default=IDLE_SECONDS)
                leases = list(self._leases.values())
            self._renew_once(leases, renew)
            if self._has_failed:
                due_at = time.monotonic() + RETRY_SECONDS

    def _renew_once(self, leases: list[_Lease], renew: RenewHolds, *, is_asked: bool = False) -> None:
        asked_at = time.monotonic()
        due = [lease for lease in leases if lease.is_due]
        holds = tuple((lease.hold, lease.length) for lease in due)
        for pulse in {lease.pulse for lease in leases if lease.pulse is not None}:
            pulse.ask()
        if not holds:
            return
        try:
            lost = renew(Renew(holds))
        except Exception as error:  # noqa: BLE001 - whatever it was, the thread must live to try again
            if not self._has_failed:
                _logger.warning("Leases could not be renewed; this is tried again every second: %s", error)
                # Once for a spell: where renewals alone go on failing, the keys of dead workers must come free.
                self._was_away = True
            self._has_failed = True
            return
        self._has_failed = False
        for hold in lost:
            with self._mutex:
                # It may have ended meanwhile, and its renewal found it so.
                found = self._leases.pop(hold.token, None)
            if found is not None:
                found.on_lost()
        for lease in due:
            # One that may have run out may be taken over at this moment, and that is not seen by a renewal.
            if is_asked or asked_at - lease.confirmed_at <= lease.length.total_seconds():
                lease.confirmed_at = asked_at


class AsyncLeases(Leases):
    """The leases of event loops, and of threads beside them, renewed by one daemon thread for all."""

    _pulse: Pulse | None = None

    def add(self, hold: Hold, lease: timedelta, on_lost: OnLost = ignore) -> None:
        """Keep *hold* alive from now on, while the running loop shows life; call *on_lost* on it when it is lost."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            super().add(hold, lease, on_lost)
            return
        pulse = self._pulse
        if pulse is None or pulse.loop is not loop:
            pulse = self._pulse = Pulse(loop, self._wake_up)
        pulse.beat()
        self._add(_Lease(hold, lease, partial(_call_on, loop, on_lost), pulse))

    def start_afresh(self) -> None:
        """Hold nothing, and have no thread: the parent's loop is not the child's, though it is the same object."""
        super().start_afresh()
        self._pulse = None


def is_late(asked_at: float, lease: timedelta) -> bool:
    """Whether so long after a claim was asked for, by the process's own clock, its lease may end before it is renewed.

    The reply may have been there for long, and its reader busy or paused: by then another worker may have the key.
    """
    return time.monotonic() - asked_at > _interval(lease)


def _call_on(loop: asyncio.AbstractEventLoop, on_lost: OnLost) -> None:
    with suppress(RuntimeError):  # It has ended, and the handlers with it.
        loop.call_soon_threadsafe(on_lost)


def _interval(lease: timedelta) -> float:
    return lease.total_seconds() / RENEWALS_PER_LEASE
