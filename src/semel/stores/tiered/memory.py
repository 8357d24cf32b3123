"""The finished answers in this process's memory: a limited number of bytes, least recently used dropped first. It asks
no store. Any number of threads may use it.

An answer is kept when the durable store has confirmed that it is finished: a claim found it, or it was completed here
under a hold with a known expiry of its record. Otherwise it is kept when a claim finds it.

It is never kept for longer than its record. The database says how long a record has left, by its own clock, at some
moment between the question and the answer. Counted from the question, the copy expires early or in time, never late.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from datetime import timedelta
from sys import getsizeof
from typing import Any

from semel.core.commands import Claim, Command, Complete, Finish, Mark
from semel.core.message import Answer
from semel.core.record import Found, Hold
from semel.core.state import TERMINAL, Event, State, after
from semel.core.value import value
from semel.stores.forks import start_afresh_in_children

#: Operations under way that are remembered. Beyond that, answers of the oldest are kept only when a claim finds them.
MAX_IN_FLIGHT = 4096

#: Two clocks under NTP may drift apart by this much: each is slewed by at most 500 in a million.
DRIFT = 1 / 1000

#: A clock that also counts while the machine sleeps, if there is one: a laptop, or a paused virtual machine.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", getattr(time, "CLOCK_MONOTONIC", None))

#: Bytes of the objects themselves, without their texts and bytes: the entry, its answer and deadline, and its
#: place in the table, which doubles as it grows.
ENTRY_BYTES = 640
#: Bytes of one header pair, and its place in the tuple.
PAIR_BYTES = getsizeof((b"", b"")) + 8


def now() -> float:
    """Return the clock's time in seconds."""
    return time.monotonic() if _CLOCK is None else time.clock_gettime(_CLOCK)


def deadline(asked_at: float, left: float) -> float:
    """Return until when a record may be kept that had *left* seconds at *asked_at* or later."""
    return asked_at + left * (1 - DRIFT)


@value
class Entry:
    """A record that has ended: the part that a replay needs, and until when it may be kept, by ``now``."""

    scope: str
    key: str
    state: State
    attempt: int
    token: bytes
    fingerprint: bytes
    answer: Answer
    steps: str | None
    is_accepted: bool
    deadline: float
    traceparent: str | None = None

    def found(self, moment: float) -> Found:
        """Return what a claim finds."""
        left = timedelta(seconds=self.deadline - moment)
        ended = (self.state, self.attempt, self.token, self.fingerprint, self.answer)
        more = (self.steps, self.is_accepted, left, self.traceparent)
        return Found(*ended, True, False, *more)  # noqa: FBT003 - a tenth of its cost

    @property
    def size(self) -> int:
        """The bytes of memory it takes, at most."""
        texts = (self.scope, self.key, self.token, self.fingerprint, self.steps, self.answer.body, self.traceparent)
        pairs = [PAIR_BYTES + getsizeof(name) + getsizeof(value) for name, value in self.answer.headers]
        return ENTRY_BYTES + sum(map(getsizeof, texts)) + sum(pairs)


class Answers:
    """The answers of one process by scope and key, and the operations under way."""

    _entries: OrderedDict[tuple[str, str], tuple[Entry, int]]
    #: By token: the fingerprint, until when the answer may be kept, and the trace.
    _in_flight: OrderedDict[bytes, tuple[bytes, float, str | None]]
    _mutex: threading.Lock

    def __init__(self, limit: int) -> None:
        """Keep at most *limit* bytes."""
        self.limit = limit
        self.start_afresh()
        start_afresh_in_children(self)

    def start_afresh(self) -> None:
        """Start empty. A fork may have happened in the middle of a change."""
        self._mutex = threading.Lock()
        self._entries = OrderedDict()
        self._in_flight = OrderedDict()
        self.size = 0

    def __len__(self) -> int:
        """Count the answers."""
        return len(self._entries)

    def get(self, scope: str, key: str) -> Found | None:
        """Return the kept answer of a key, if it has not expired."""
        place = scope, key
        if place not in self._entries:
            return None
        with self._mutex:
            kept = self._entries.get(place)
            if kept is None:
                return None
            entry = kept[0]
            moment = now()
            if moment >= entry.deadline:
                self._drop(place)
                return None
            self._entries.move_to_end(place)
        return entry.found(moment)

    def put(self, entry: Entry) -> Entry:
        """Keep *entry*, replacing an older one of its key, and drop others if there is no room."""
        if not self.limit:
            return entry
        size = entry.size
        place = entry.scope, entry.key
        with self._mutex:
            if place in self._entries:
                self._drop(place)
            if size <= self.limit and now() < entry.deadline:
                self._entries[place] = entry, size
                self.size += size
                while self.size > self.limit:
                    self._drop(next(iter(self._entries)))
        return entry

    def claimed(self, claim: Claim, got: object, asked_at: float) -> Entry | None:
        """Note the result of a claim; return the answer if it found one that will stay for a while."""
        if isinstance(got, Hold) and not claim.is_accepted:
            with self._mutex:
                until = deadline(asked_at, claim.retention.total_seconds())
                self._in_flight[got.token] = claim.fingerprint, until, claim.traceparent
                if len(self._in_flight) > MAX_IN_FLIGHT:
                    self._in_flight.popitem(last=False)
        if not isinstance(got, Found) or got.answer is None or got.is_expired or got.retention_left is None:
            return None
        if got.state not in TERMINAL:
            return None
        until = deadline(asked_at, got.retention_left.total_seconds())
        ended = (got.state, got.attempt, got.token, got.fingerprint, got.answer, got.steps, got.is_accepted)
        return self.put(Entry(claim.scope, claim.key, *ended, until, got.traceparent))

    def ending(self, command: Command[Any]) -> tuple[bytes, float, str | None] | None:
        """Return what is known of the record if *command* is about to store its answer.

        It is returned once: of two answers that are sent for one hold, the durable store keeps the first, and returns
        the same for both. Any other command under the hold may change fields that are not known here.
        """
        hold: Hold | None = getattr(command, "hold", None)
        if hold is None or type(command) is Mark:
            return None
        with self._mutex:
            known = self._in_flight.pop(hold.token, None)
        return known if type(command) is Complete else None

    def ended(self, command: Complete | Finish, fingerprint: bytes, until: float, trace: str | None) -> Entry:
        """Keep an answer that the durable store has."""
        hold = command.hold
        who = (hold.scope, hold.key, _ENDED[command.event], hold.attempt, hold.token)
        return self.put(Entry(*who, fingerprint, command.answer, None, False, until, trace))  # noqa: FBT003 - as above

    def forget(self, places: Iterable[tuple[str, str]]) -> None:
        """Drop the answers of these scopes and keys."""
        with self._mutex:
            for place in places:
                if place in self._entries:
                    self._drop(place)

    def _drop(self, place: tuple[str, str]) -> None:
        _, size = self._entries.pop(place)
        self.size -= size


#: From the state machine, which has None for impossible transitions.
_ENDED = {
    event: state for event in (Event.COMPLETE, Event.FAIL) if (state := after(State.PROCESSING, event)) is not None
}
