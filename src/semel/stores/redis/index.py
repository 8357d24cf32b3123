"""Which records somebody should look at, and when: a hint beside them, since a script on a Cluster has one key.

The truth is in the records. What is listed is looked at before anything is done about it, and struck off when there is
nothing to do. What is missing is found by a walk through all of them (``walk.py``), or by whoever retries.

Listing every operation would cost as much as claiming it, and most end at once. So this process remembers which ones it
has begun, and lists those that are still running after a while, together with the next claims or renewals that it sends
anyway. An operation is missing if its process dies before that: within two ticks where there is traffic, and where
there is none before its first renewal. What was accepted, or given up, has nobody who runs it, and is listed at once.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

from semel.stores.redis.wire import Call, Reply, script

#: The last digit of a record's name is its list: so many servers of a Cluster can share the work.
DIGITS = "0123456789abcdef"

#: How long, in seconds, an operation runs before it is worth listing.
TICK = 0.1

#: Of operations that nobody ended: where their process was told nothing more of them, they are forgotten in the end.
MOST_LISTED = 10_000


@dataclass(slots=True)
class Errand:
    """One call beside those that somebody waits for."""

    call: Call
    #: Those that it lists, and the delays that it lists them with.
    delays: dict[bytes, int] = field(default_factory=dict)


class Index:
    """What one process knows of its operations. Any number of threads may tell it."""

    def __init__(self, prefix: str) -> None:
        """Know of none."""
        self._prefix = f"{prefix}:due:".encode()
        self._mutex = threading.Lock()
        self._next = 0.0
        #: Begun since the last tick, and before it, with the ends of their leases, by the process's own clock.
        self._young: dict[bytes, float] = {}
        self._old: dict[bytes, float] = {}
        #: On their way to the list; and there, under these times.
        self._moving: dict[bytes, float] = {}
        self._listed: dict[bytes, int] = {}
        #: Ended, and to be struck off.
        self._struck: dict[bytes, int] = {}
        #: Ended, and to be looked at when their retention is over.
        self._kept: dict[bytes, int] = {}

    def list_of(self, digit: str) -> bytes:
        """Return the key of one of the lists."""
        return self._prefix + digit.encode()

    def began(self, name: bytes, lease: timedelta, now: float) -> None:
        """Remember that this process runs an operation since *now*, by its own clock."""
        with self._mutex:
            self._young[name] = now + lease.total_seconds()

    def ended(self, name: bytes, kept_for: int | None = None) -> None:
        """Forget an operation; but look at its record again when it was *kept_for* so long."""
        with self._mutex:
            for running in (self._young, self._old, self._moving):
                running.pop(name, None)
            listed = self._listed.pop(name, None)
            if kept_for is not None:
                self._kept[name] = kept_for
            elif listed is not None:
                self._struck[name] = listed

    def errands(self, now: float) -> list[Errand]:
        """Return what is to be sent beside the next calls, at the process's own time *now*: mostly nothing."""
        if now < self._next or not (self._young or self._old or self._struck or self._kept):
            return []
        with self._mutex:
            self._next = now + TICK
            due, self._old, self._young = self._old, self._young, {}
            return self._pack(due, {name: max(int((end - now) * 1_000_000), 0) for name, end in due.items()})

    def rest(self) -> list[Errand]:
        """Return all that is left to be sent; what still runs is to be looked at now."""
        with self._mutex:
            due = self._old | self._young
            self._old, self._young = {}, {}
            return self._pack(due, dict.fromkeys(due, 0))

    def done(self, errands: Sequence[Errand], replies: Sequence[Reply]) -> None:
        """Take note of what came of errands."""
        with self._mutex:
            for errand, reply in zip(errands, replies, strict=True):
                for name, delay in errand.delays.items():
                    end = self._moving.pop(name, None)
                    if end is None:
                        continue  # It ended meanwhile. Whoever looks at it strikes it off.
                    if isinstance(reply, Exception):
                        self._old[name] = end
                    else:
                        self._listed[name] = reply + delay
            while len(self._listed) > MOST_LISTED:
                del self._listed[next(iter(self._listed))]

    def enlist(self, delays: Iterable[tuple[bytes, int]]) -> list[Errand]:
        """Return the calls that list records, to be looked at after so many microseconds each."""
        by_digit: dict[str, dict[bytes, int]] = {}
        for name, delay in delays:
            by_digit.setdefault(chr(name[-1]), {})[name] = delay
        return [
            Errand(
                script("enlist").on(
                    self.list_of(digit), *[word for name, delay in some.items() for word in (name, b"%d" % delay)]
                ),
                some,
            )
            for digit, some in by_digit.items()
        ]

    def refile(self, changes: Iterable[tuple[bytes, int, int | None]]) -> list[Errand]:
        """Return the calls that put records off from one time to another, or strike them off (None)."""
        by_digit: dict[str, list[bytes]] = {}
        for name, seen, new in changes:
            words = by_digit.setdefault(chr(name[-1]), [])
            words += [name, b"%d" % seen, b"" if new is None else b"%d" % new]
        return [Errand(script("refile").on(self.list_of(digit), *words)) for digit, words in by_digit.items()]

    def _pack(self, due: dict[bytes, float], delays: dict[bytes, int]) -> list[Errand]:
        struck, self._struck = self._struck, {}
        kept, self._kept = self._kept, {}
        self._moving |= due
        return [
            *self.enlist((delays | kept).items()),
            *self.refile((name, seen, None) for name, seen in struck.items()),
        ]
