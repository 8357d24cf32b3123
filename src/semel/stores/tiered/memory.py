"""The finished answers that this process keeps: at most so many bytes of them, and those that were asked for last. Any
number of threads may use it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from semel.core.record import Found
from semel.stores.forks import start_afresh_in_children
from semel.stores.tiered.entry import Entry
from semel.stores.tiered.expiry import now


class LocalAnswers:
    """Answers by scope and key."""

    _entries: OrderedDict[tuple[str, str], tuple[Entry, int]]
    _mutex: threading.Lock

    def __init__(self, limit: int) -> None:
        """Keep at most *limit* bytes."""
        self.limit = limit
        self.start_afresh()
        start_afresh_in_children(self)

    def start_afresh(self) -> None:
        """Keep nothing. A fork may have come in the middle of a change."""
        self._mutex = threading.Lock()
        self._entries = OrderedDict()
        self.size = 0

    def __len__(self) -> int:
        """Count the answers."""
        return len(self._entries)

    def get(self, scope: str, key: str) -> Found | None:
        """Return what is kept of a key, if its time is not over."""
        place = scope, key
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

    def put(self, entry: Entry) -> None:
        """Keep *entry*, in place of what is kept of its key, and let go of others if it takes that."""
        if not self.limit:
            return
        size = entry.size
        place = entry.scope, entry.key
        with self._mutex:
            if place in self._entries:
                self._drop(place)
            if size > self.limit or now() >= entry.deadline:
                return
            self._entries[place] = entry, size
            self.size += size
            while self.size > self.limit:
                self._drop(next(iter(self._entries)))

    def clear(self) -> None:
        """Let go of everything."""
        with self._mutex:
            self._entries.clear()
            self.size = 0

    def _drop(self, place: tuple[str, str]) -> None:
        _, size = self._entries.pop(place)
        self.size -= size
