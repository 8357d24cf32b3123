"""The queue of this process's threads that write to a SQLite file. What they write is not known here.

SQLite would give the lock to the thread that asks most often, and the others would starve.
"""

from __future__ import annotations

import threading

from semel.core.commands import Begin, Open
from semel.core.record import NO_TOKEN, Found
from semel.core.state import State
from semel.stores.forks import start_afresh_in_children
from semel.stores.sqlite.file import BUSY_TIMEOUT, Place
from semel.stores.sqlite.transactions import kept_waiting

#: How many times as long to wait while the queue moves. A client would give up before that.
MAX_WAITS = 6


class Turns:
    """The turns at one file, and the keys of this process's open transactions."""

    def __init__(self) -> None:
        """Start with an empty queue."""
        self.start_afresh()
        start_afresh_in_children(self)

    def start_afresh(self) -> None:
        """Start with no waiters: in a child, the thread that had the turn does not exist."""
        #: The fingerprints of running transactions, by key. Each is in its own list, so that equal ones differ.
        self._running: dict[tuple[str, str], list[bytes]] = {}
        self._turn = threading.Lock()
        self._holder = ""
        #: How often the turn was passed on.
        self._given = 0

    def start(self, command: Begin | Open) -> Found | None:
        """Note that a transaction has a key; or return what another one has there."""
        if not isinstance(command, Begin):
            return None
        claim = command.claim
        mine = [claim.fingerprint]
        first = self._running.setdefault((claim.scope, claim.key), mine)
        if first is mine:
            return None
        return Found(State.PROCESSING, 1, NO_TOKEN, first[0], None, lease_is_over=False, is_expired=False)

    def stop(self, command: Begin | Open) -> None:
        """Note that it has ended."""
        if isinstance(command, Begin):
            self._running.pop((command.claim.scope, command.claim.key), None)

    def take(self, who: str, place: Place) -> None:
        """Wait for the turn. *who* is named in the error of others that wait too long."""
        for _ in range(MAX_WAITS):
            given = self._given
            if self._turn.acquire(timeout=BUSY_TIMEOUT.total_seconds()):
                self._holder = who
                return
            if self._given == given:
                # The same holder had it all that time. While the queue moves, every turn comes.
                break
        raise kept_waiting(place, self._holder)

    def give_on(self) -> None:
        """Pass the turn on."""
        self._given += 1
        self._turn.release()


#: By alias: several stores of one process write to one file.
_turns: dict[str, Turns] = {}


def turns_of(alias: str) -> Turns:
    """Return the turns at the file of the database *alias*."""
    return _turns.setdefault(alias, Turns())
