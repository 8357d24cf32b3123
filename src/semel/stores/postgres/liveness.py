"""Shows others that this process lives, so that they need not wait for the leases of one that does not.

With ``?takeover=instant`` a process holds one advisory lock, of a number drawn at random (``signals.owner_lock``), on a
connection of its own for as long as it lives. What it claims bears the number. Another that finds such a key in
progress, and gets the lock, knows that the process is dead: its kernel has closed its connections, and the server has
freed its locks. Nothing here decides who may store an answer: that is the fence's doing, with or without a lock.

The order, and what becomes of what comes in between:

1. *The lock first, then the claims.* ``settle`` is called before the first claim is written, and returns when the lock
   is held, or could not be had. Without one, claims bear no number: then the lease alone tells, as it does elsewhere.
2. *A claim bears a number only while its lock is held.* The statement that writes it looks, on the server that writes
   it. So a claim that was under way as the lock was lost, or is sent again to the server that is the primary now, where
   the lock is not held, bears none.
3. *A lock that is lost is lost for good.* Every claim that bears its number may be taken over from that instant, though
   its handler runs. So all whom ``watch`` was told of are called at once: the keepers of leases, which tell every
   handler that its hold is lost. The number is not drawn again; new claims bear the next one, once its lock is held.
4. *Who was not there to be called.* Between the claim's return and ``Leases.add`` a hold is known to no leases, and
   it is not told. Its record tells: to ``Renew``, a hold is lost when its owner's lock is free, so it is told with the
   next renewal, sooner than its lease could have run out. Until then it is a worker that was taken for dead, as every
   worker may be, and fenced.

A stopped process (SIGSTOP, a debugger) lives: its kernel keeps the connection. That is what leases are for, still. So
they are for a machine that dies without a word, until the server has noticed (``network.DEAD_AFTER_SECONDS``); and for
for an app behind a pooler, on which no lock can be held.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from semel.stores.postgres.address import CONNECT_SECONDS
from semel.stores.postgres.direct import DirectConnection
from semel.stores.postgres.errors import read_only
from semel.stores.postgres.signals import owner_lock

_logger = logging.getLogger("semel")

OnLoss = Callable[[], None]

#: To connect, and to be told that the lock is held. Requests wait for it once in the life of a process.
SETTLE_SECONDS = 2 * CONNECT_SECONDS

NO_LOCK = (
    "No lock shows that this process lives. What it held under one is lost; what it claims now waits for its lease: %s"
)

if TYPE_CHECKING:
    # Not imported here: where the extra is missing, ``direct.py`` says so.
    from psycopg import Connection

_IN_RECOVERY = "SELECT pg_is_in_recovery()"
_LOCK = "SELECT pg_try_advisory_lock(%s)"


class Liveness(DirectConnection):
    """Holds a lock from the first claim until it is closed."""

    name = "semel-liveness"

    #: Called, each in our thread, when all that bears our number is lost. A fork leaves them as they are.
    _watchers: tuple[OnLoss, ...] = ()
    _owner: int | None = None
    #: Whether a lock is held, or could not be had; or it was tried for long enough.
    _is_settled: threading.Event
    #: Whether it was said already that there is none.
    _has_warned = False

    @property
    def is_settled(self) -> bool:
        """Whether ``settle`` would return at once."""
        return self._is_settled.is_set()

    def owner(self) -> int | None:
        """Return the number of the lock that is held now, if one is."""
        return self._owner

    def watch(self, on_loss: OnLoss) -> None:
        """Call *on_loss*, in a thread of ours, when all that was claimed up to then is lost."""
        self._watchers += (on_loss,)

    def settle(self) -> None:
        """See that a lock is held, or that there can be none now. This waits the first time, and never again."""
        settled = self._is_settled
        if not settled.is_set():
            self.start()
            settled.wait(SETTLE_SECONDS)
            settled.set()

    def close(self) -> None:
        """Let go of the lock. Who still works under it is told that its hold is lost."""
        super().close()
        self._is_settled = threading.Event()

    def start_afresh(self) -> None:
        """Hold no lock: a forked child has one of its own, from its first claim on."""
        super().start_afresh()
        self._owner = None
        self._is_settled = threading.Event()

    def opened(self, connection: Connection[Any]) -> None:
        """Take a lock that no other session has."""
        if _asked(connection, _IN_RECOVERY):
            raise read_only(str(self.address))
        number = owner_lock()
        while not _asked(connection, _LOCK, number):
            number = owner_lock()
        self._owner = number
        self._has_warned = False
        self._is_settled.set()

    def heard(self, payload: str) -> None:
        """Nothing is said here."""

    def lost(self) -> None:
        """Tell the leases that bear our number."""
        self._owner = None
        for on_loss in self._watchers:
            on_loss()

    def failed(self, error: Exception) -> None:
        """Say once that there is no lock for now."""
        level = logging.DEBUG if self._has_warned else logging.WARNING
        self._has_warned = True
        _logger.log(level, NO_LOCK, error)
        self._is_settled.set()

    def pooled(self) -> None:
        """Say that there will be no lock."""
        _logger.warning(
            "%s is a pooler, where no lock can be held: ?takeover=instant is of no use, and leases decide.",
            self.address,
        )
        self._is_settled.set()


def _asked(connection: Connection[Any], question: str, *values: int) -> bool:
    return bool(connection.execute(question.encode(), values or None).fetchall()[0][0])
