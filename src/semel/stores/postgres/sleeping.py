"""The direct connection of a relay that sleeps: it listens, and holds the lock that tells others to notify it. When a
relay sleeps, ``work/waking.py`` says.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from semel.stores.postgres.address import Address
from semel.stores.postgres.direct import DirectConnection
from semel.stores.postgres.signals import channel_of

if TYPE_CHECKING:
    # Not imported here: where the extra is missing, ``direct.py`` says so.
    from psycopg import Connection

_logger = logging.getLogger("semel")

#: What ``add`` notifies with.
HINT = "outbox"

#: Whether the lock was had; and if not, whether it could be had shared: then open transactions have it, and no relay.
#: Where transactions can be prepared (two-phase commit), none must notify: PREPARE TRANSACTION refuses one that has.
_TRY = (
    b"SELECT CASE WHEN current_setting('max_prepared_transactions') = '0' THEN pg_try_advisory_lock(%s) ELSE false END"
)
_TRY_SHARED = b"SELECT pg_try_advisory_lock_shared(%s)"
_UNLOCK = b"SELECT pg_advisory_unlock(%s)"
_UNLOCK_SHARED = b"SELECT pg_advisory_unlock_shared(%s)"


class Sleeper(DirectConnection):
    """Wakes a relay by NOTIFY."""

    name = "semel-relay-sleeper"

    def __init__(self, address: Address, lock: int, on_wake: Callable[[], None]) -> None:
        """Hold *lock* while the relay sleeps, and call *on_wake*, in a thread, when it is to wake."""
        self._lock = lock
        self._on_wake = on_wake
        self._channel = channel_of(address.names)
        self._connection: Connection[Any] | None = None
        self._has_lock = False
        #: Whether the relay relies on being woken.
        self.is_asleep = False
        self._using = threading.Lock()
        super().__init__(address)

    def fall_asleep(self) -> bool:
        """Take the lock, or leave it to another relay that sleeps here; return whether others will notify."""
        self.start()
        with self._using, suppress(Exception):
            connection = self._connection
            if connection is None or self.is_asleep:
                return self.is_asleep
            if self._asked(connection, _TRY):
                self._has_lock = self.is_asleep = True
            elif self._asked(connection, _TRY_SHARED):
                self._asked(connection, _UNLOCK_SHARED)
            else:
                self.is_asleep = True
        return self.is_asleep

    def wake_up(self) -> None:
        """Free the lock."""
        with self._using:
            has_lock, self._has_lock = self._has_lock, False
            self.is_asleep = False
            if has_lock and self._connection is not None:
                with suppress(Exception):
                    self._asked(self._connection, _UNLOCK)

    def opened(self, connection: Connection[Any]) -> None:
        """Begin to listen."""
        connection.execute(f"LISTEN {self._channel}".encode())
        self._connection = connection

    def heard(self, payload: str) -> None:
        """Wake the relay."""
        if payload == HINT and self.is_asleep:
            self._on_wake()

    def lost(self) -> None:
        """Take note that the lock is free; the relay polls."""
        # It is closed next, and must not be while another thread uses it.
        with self._using:
            self._connection = None
            self._has_lock = self.is_asleep = False

    def failed(self, error: Exception) -> None:
        """Log it."""
        _logger.debug("%s: a relay can't be woken for now, and polls: %s", self.address, error)

    def pooled(self) -> None:
        """Log it."""
        _logger.debug("%s is a pooler, which passes no hints on: a relay polls.", self.address)

    def start_afresh(self) -> None:
        """Have no connection. In a forked child, it is the parent's."""
        super().start_afresh()
        self._connection = None
        self._has_lock = self.is_asleep = False
        self._using = threading.Lock()

    def _asked(self, connection: Connection[Any], sql: bytes) -> bool:
        return bool(connection.execute(sql, [self._lock]).fetchall()[0][0])
