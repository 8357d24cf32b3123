"""Whose turn it is to write to a SQLite file, among the threads of this process. What they write is not known here.

Left to SQLite, who asks most often would get the lock, and the rest would starve.
"""

from __future__ import annotations

import threading

from semel.core.commands import Begin, Open
from semel.core.record import NOBODYS_TOKEN, Found
from semel.core.state import State
from semel.stores.forks import start_afresh_in_children
from semel.stores.sqlite.file import BUSY_TIMEOUT, Place
from semel.stores.sqlite.transactions import kept_waiting

#: How many times as long to wait in a crowd that moves. A client that waits longer has given up by itself.
MAX_WAITS = 6


class Turns:
    """The turns at one file, and the keys that transactions of this process are at."""

    def __init__(self) -> None:
        """Nobody is at any."""
        self.start_afresh()
        start_afresh_in_children(self)

    def start_afresh(self) -> None:
        """Have nobody waiting: in a child, whoever had the turn is not there to give it on."""
        #: The fingerprints of what runs, by key. Each is in a list of its own, so that it can be told from its like.
        self._running: dict[tuple[str, str], list[bytes]] = {}
        self._turn = threading.Lock()
        self._holder = ""
        #: How often it was given on.
        self._given = 0

    def start(self, command: Begin | Open) -> Found | None:
        """Set down that a transaction is at a key; or say what another one is at there."""
        if not isinstance(command, Begin):
            return None
        claim = command.claim
        mine = [claim.fingerprint]
        first = self._running.setdefault((claim.scope, claim.key), mine)
        if first is mine:
            return None
        return Found(State.PROCESSING, 1, NOBODYS_TOKEN, first[0], None, lease_is_over=False, is_expired=False)

    def stop(self, command: Begin | Open) -> None:
        """Set down that it is at it no more."""
        if isinstance(command, Begin):
            self._running.pop((command.claim.scope, command.claim.key), None)

    def take(self, who: str, place: Place) -> None:
        """Wait for the turn. *who* is named to those who wait in vain."""
        for _ in range(MAX_WAITS):
            given = self._given
            if self._turn.acquire(timeout=BUSY_TIMEOUT.total_seconds()):
                self._holder = who
                return
            if self._given == given:
                # One and the same has it all that time. In a crowd that moves, everybody's turn comes.
                break
        raise kept_waiting(place, self._holder)

    def give_on(self) -> None:
        """Let the next have its turn."""
        self._given += 1
        self._turn.release()


#: By alias: several stores of one process write to one file.
_turns: dict[str, Turns] = {}


def turns_of(alias: str) -> Turns:
    """Return the turns at the file of the database *alias*."""
    return _turns.setdefault(alias, Turns())
