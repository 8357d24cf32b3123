"""Which records a service should check, and when: lists in addition to the records, since a script on a Cluster has one
key; and a walk through all records, for those on no list. It decides nothing.

Only the records decide. A listed record is read before anything is done about it, and removed from the list if there is
nothing to do. A record that is missing from the lists is found by the walk, or by a retry.

Listing every operation would cost as much as claiming it, and most end at once. So this process remembers the ones it
has begun, and lists those that still run after a while, together with the next claims or renewals that it sends
anyway. An operation is missing if its process dies before that: within two ticks if there is traffic, else before its
first renewal. An accepted or given-up operation has no worker, and is listed at once.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from semel.stores.redis.address import Node
from semel.stores.redis.cluster import Client
from semel.stores.redis.protocol import Call, Reply, packed, script

#: The last digit of a record's name is its list: so many servers of a Cluster can share the work.
DIGITS = "0123456789abcdef"

#: How long, in seconds, an operation runs before it is listed.
TICK = 0.1

#: Operations that are remembered at most. Without a known end they are dropped at some time.
MAX_LISTED = 10_000

#: How many keys the server goes through in one step of a walk: a millisecond of its time.
STEP = 1000


@dataclass(slots=True)
class Listing(Call):
    """A call that lists records."""

    #: After how many microseconds each is to be looked at.
    delays: dict[bytes, int] = field(default_factory=dict)


class DueList:
    """What one process knows of its operations. Any number of threads may use it."""

    def __init__(self, prefix: str) -> None:
        """Start empty."""
        self._prefix = f"{prefix}:due:".encode()
        self._mutex = threading.Lock()
        self._next = 0.0
        #: Begun since the last tick, and before it, with the ends of their leases, by the process's own clock.
        self._young: dict[bytes, float] = {}
        self._old: dict[bytes, float] = {}
        #: Being sent to the list; and on the list, under these times.
        self._moving: dict[bytes, float] = {}
        self._listed: dict[bytes, int] = {}
        #: Ended, and to be removed from the list.
        self._struck: dict[bytes, int] = {}
        #: Ended, and to be looked at when their retention is over.
        self._kept: dict[bytes, int] = {}

    def list_of(self, digit: str) -> bytes:
        """Return the key of one of the lists."""
        return self._prefix + digit.encode()

    def began(self, leases: Iterable[tuple[bytes, float]]) -> None:
        """Remember that this process runs operations, with the ends of their leases by its own clock."""
        with self._mutex:
            self._young.update(leases)

    def ended(self, records: Iterable[tuple[bytes, int | None]]) -> None:
        """Drop operations; a record that is kept for so many microseconds is listed again."""
        with self._mutex:
            for name, kept_for in records:
                for running in (self._young, self._old, self._moving):
                    running.pop(name, None)
                listed = self._listed.pop(name, None)
                if kept_for is not None:
                    self._kept[name] = kept_for
                elif listed is not None:
                    self._struck[name] = listed

    def calls(self, now: float) -> list[Call]:
        """Return the calls to send together with the next ones, at the process's own time *now*: mostly none."""
        if now < self._next or not (self._young or self._old or self._struck or self._kept):
            return []
        with self._mutex:
            self._next = now + TICK
            due, self._old, self._young = self._old, self._young, {}
            return self._pack(due, {name: max(int((end - now) * 1_000_000), 0) for name, end in due.items()})

    def rest(self) -> list[Call]:
        """Return all remaining calls; operations that still run are listed as due now."""
        with self._mutex:
            due = self._old | self._young
            self._old, self._young = {}, {}
            return self._pack(due, dict.fromkeys(due, 0))

    def listed(self, calls: Sequence[Call], replies: Sequence[Reply]) -> None:
        """Note the replies to the calls of ``calls`` or ``rest``."""
        with self._mutex:
            for call, reply in zip(calls, replies, strict=True):
                if not isinstance(call, Listing):
                    continue
                for name, delay in call.delays.items():
                    end = self._moving.pop(name, None)
                    if end is None:
                        continue  # It ended meanwhile. A service that reads it removes it.
                    if isinstance(reply, Exception):
                        self._old[name] = end
                    else:
                        self._listed[name] = reply + delay
            while len(self._listed) > MAX_LISTED:
                del self._listed[next(iter(self._listed))]

    def enlist(self, delays: Iterable[tuple[bytes, int]]) -> list[Call]:
        """Return the calls that list records, each due after so many microseconds."""
        by_digit: dict[str, dict[bytes, int]] = {}
        for name, delay in delays:
            by_digit.setdefault(chr(name[-1]), {})[name] = delay
        calls: list[Call] = []
        for digit, some in by_digit.items():
            call = script("enlist").on(self.list_of(digit), *[word for pair in some.items() for word in pair])
            calls.append(Listing(call.key, call.data, call.script, delays=some))
        return calls

    def refile(self, changes: Iterable[tuple[bytes, int, int | None]]) -> list[Call]:
        """Return the calls that move records from one time to another, or remove them (None)."""
        by_digit: dict[str, list[bytes | int]] = {}
        for name, seen, new in changes:
            by_digit.setdefault(chr(name[-1]), []).extend((name, seen, b"" if new is None else new))
        return [script("refile").on(self.list_of(digit), *words) for digit, words in by_digit.items()]

    def _pack(self, due: dict[bytes, float], delays: dict[bytes, int]) -> list[Call]:
        struck, self._struck = self._struck, {}
        kept, self._kept = self._kept, {}
        self._moving |= due
        return [
            *self.enlist((delays | kept).items()),
            *self.refile((name, seen, None) for name, seen in struck.items()),
        ]


class Walk:
    """The position of a walk through all keys of a kind. It goes on where it stopped, and starts again at the end."""

    def __init__(self, pattern: str, kind: str) -> None:
        """Look for keys like *pattern* that hold a *kind* of value."""
        self._words = ("MATCH", pattern, "COUNT", STEP, "TYPE", kind)
        #: The remaining servers; the first one is being scanned.
        self._nodes: list[Node] = []
        self._cursor = b"0"

    @property
    def is_at_end(self) -> bool:
        """Whether it has come to the end, and would start again."""
        return not self._nodes

    @property
    def place(self) -> tuple[str, str]:
        """The server that is being scanned, and its cursor: where ``resume`` goes on. Not at the end."""
        return str(self._nodes[0]), self._cursor.decode()

    async def resume(self, client: Client, node: str, cursor: bytes) -> None:
        """Go on at a place; or start again, if that server has no data any more."""
        nodes = await client.masters()
        places = [str(each) for each in nodes]
        if node in places and cursor.isdigit():
            self._nodes, self._cursor = nodes[places.index(node) :], cursor

    async def stretch(self, client: Client, max_steps: int | None = None) -> set[bytes]:
        """Go on for so many steps, or to the end, and return the keys found."""
        found: set[bytes] = set()
        if not self._nodes:
            self._nodes, self._cursor = await client.masters(), b"0"
        steps = 0
        while self._nodes and steps != max_steps:
            call = Call(b"", packed("SCAN", self._cursor, *self._words), node=self._nodes[0])
            try:
                self._cursor, keys = await client.read_one(call)
            except Exception:
                # That server may not come back: the next walk asks for the current servers.
                self._nodes = []
                raise
            found.update(keys)
            steps += 1
            if self._cursor == b"0":
                del self._nodes[0]
        return found
