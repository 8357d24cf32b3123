"""The finished answers that this process keeps: at most so many bytes of them, and those that were asked for last. It
asks no store. Any number of threads may use it.

An answer is kept when the durable store has said that it is finished: it was found so, or it was completed here under a
hold of which it is known when the record expires. Otherwise it is kept when it is found.

It is never kept for longer than its record is. The database says how long a record has left, by its own clock, at some
moment after it was asked and before it has answered. Counted from when it was asked, that ends too early or in time.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from datetime import timedelta
from sys import getsizeof
from typing import Any

from semel.core.commands import Claim, Command, Complete, Finish, Mark
from semel.core.message import Answer
from semel.core.record import Found, Hold
from semel.core.state import TERMINAL, Event, State, after
from semel.core.value import value
from semel.stores.forks import start_afresh_in_children

#: Operations of one process that are under way. Of more, the answers of the oldest are not kept until they are found.
MAX_IN_FLIGHT = 4096

#: Two clocks that are kept right by NTP may run apart by so much: each is slewed by at most 500 in a million.
DRIFT = 1 / 1000

#: Counts on while the machine sleeps, where there is such a clock: a laptop, or a virtual machine that was paused.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", getattr(time, "CLOCK_MONOTONIC", None))

#: What the objects themselves take, besides the texts and bytes they hold: the entry, its answer and deadline, and its
#: place in the table, which doubles as it grows.
ENTRY_BYTES = 640
#: A pair of one header, and its place among the others.
PAIR_BYTES = getsizeof((b"", b"")) + 8


def now() -> float:
    """Return the seconds that have passed, since whenever."""
    return time.monotonic() if _CLOCK is None else time.clock_gettime(_CLOCK)


def deadline(asked_at: float, left: float) -> float:
    """Return until when something may be kept that had *left* seconds when it was asked for, or later."""
    return asked_at + left * (1 - DRIFT)


@value
class Entry:
    """A record that has ended: as much of it as a replay needs, and until when it may be kept, by ``now``."""

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

    def found(self, moment: float) -> Found:
        """Return what a claim comes upon."""
        left = timedelta(seconds=self.deadline - moment)
        ended = (self.state, self.attempt, self.token, self.fingerprint, self.answer)
        return Found(*ended, True, False, self.steps, self.is_accepted, left)  # noqa: FBT003 - a tenth of its cost

    @property
    def size(self) -> int:
        """How many bytes of memory it takes, at most."""
        texts = (self.scope, self.key, self.token, self.fingerprint, self.steps, self.answer.body)
        pairs = [PAIR_BYTES + getsizeof(name) + getsizeof(value) for name, value in self.answer.headers]
        return ENTRY_BYTES + sum(map(getsizeof, texts)) + sum(pairs)


class Answers:
    """The answers of one process by scope and key, and the operations whose answers it will keep."""

    _entries: OrderedDict[tuple[str, str], tuple[Entry, int]]
    #: By token: the fingerprint, and until when the answer may be kept.
    _in_flight: OrderedDict[bytes, tuple[bytes, float]]
    _mutex: threading.Lock

    def __init__(self, limit: int) -> None:
        """Keep at most *limit* bytes."""
        self.limit = limit
        self.start_afresh()
        start_afresh_in_children(self)

    def start_afresh(self) -> None:
        """Keep nothing, and have nothing under way. A fork may have come in the middle of a change."""
        self._mutex = threading.Lock()
        self._entries = OrderedDict()
        self._in_flight = OrderedDict()
        self.size = 0

    def __len__(self) -> int:
        """Count the answers."""
        return len(self._entries)

    def get(self, scope: str, key: str) -> Found | None:
        """Return what is kept of a key, if its time is not over."""
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
        """Keep *entry*, in place of what is kept of its key, and drop others if it takes that."""
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
        """Note what came of a claim; return the answer where it has found one that will stay for a while."""
        if isinstance(got, Hold) and not claim.is_accepted:
            with self._mutex:
                self._in_flight[got.token] = claim.fingerprint, deadline(asked_at, claim.retention.total_seconds())
                if len(self._in_flight) > MAX_IN_FLIGHT:
                    self._in_flight.popitem(last=False)
        if not isinstance(got, Found) or got.answer is None or got.is_expired or got.retention_left is None:
            return None
        if got.state not in TERMINAL:
            return None
        until = deadline(asked_at, got.retention_left.total_seconds())
        ended = (got.state, got.attempt, got.token, got.fingerprint, got.answer, got.steps, got.is_accepted)
        return self.put(Entry(claim.scope, claim.key, *ended, until))

    def ending(self, command: Command[Any]) -> tuple[bytes, float] | None:
        """Return what is known of the record whose answer *command* is about to store.

        It is known once: of two answers that are sent for one hold, the durable store keeps the first, and says the
        same of both. Any other command under the hold may change more of the record than is known here.
        """
        hold: Hold | None = getattr(command, "hold", None)
        if hold is None or type(command) is Mark:
            return None
        with self._mutex:
            known = self._in_flight.pop(hold.token, None)
        return known if type(command) is Complete else None

    def ended(self, command: Complete | Finish, fingerprint: bytes, until: float) -> Entry:
        """Keep an answer that the durable store has."""
        hold = command.hold
        who = (hold.scope, hold.key, _ENDED[command.event], hold.attempt, hold.token)
        return self.put(Entry(*who, fingerprint, command.answer, None, is_accepted=False, deadline=until))

    def _drop(self, place: tuple[str, str]) -> None:
        _, size = self._entries.pop(place)
        self.size -= size


#: As the state machine has it, which says None of what can't be.
_ENDED = {
    event: state for event in (Event.COMPLETE, Event.FAIL) if (state := after(State.PROCESSING, event)) is not None
}
