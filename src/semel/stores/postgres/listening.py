"""Hints for threads: hears on a connection of its own, through psycopg, which operations end in other processes.

Nothing depends on it. What is said while the connection is lost is never heard, and behind a pooler nothing is heard at
all: waiters poll the store, and that is the truth.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from semel.stores.postgres.address import Address
from semel.stores.postgres.direct import DirectConnection
from semel.stores.postgres.signals import channel_of

if TYPE_CHECKING:
    # Not imported here: where the extra is missing, ``direct.py`` says so.
    from psycopg import Connection

_logger = logging.getLogger("semel")

OnEnd = Callable[[str], None]


class Listener(DirectConnection):
    """Listens from the first who wants to hear until it is closed."""

    name = "semel-listener"

    _wanted_by: tuple[OnEnd, ...]

    def __init__(self, address: Address) -> None:
        """Listen to what is said of the table at *address*. Nothing is connected yet."""
        self._channel = channel_of(address.names)
        super().__init__(address)

    def add(self, on_end: OnEnd) -> None:
        """Call *on_end*, in a thread of its own, with all that is said from now on."""
        with self._mutex:
            if on_end not in self._wanted_by:
                self._wanted_by += (on_end,)
        self.start()

    def close(self) -> None:
        """Stop listening."""
        super().close()
        self._wanted_by = ()

    def start_afresh(self) -> None:
        """Have no listeners."""
        super().start_afresh()
        self._wanted_by = ()

    def opened(self, connection: Connection[Any]) -> None:
        """Begin to listen."""
        connection.execute(f"LISTEN {self._channel}".encode())

    def heard(self, payload: str) -> None:
        """Tell all who want to hear."""
        for on_end in self._wanted_by:
            on_end(payload)

    def lost(self) -> None:
        """Do nothing: waiters poll."""

    def failed(self, error: Exception) -> None:
        """Log it."""
        _logger.debug(NOT_HEARD, self.address, error)

    def pooled(self) -> None:
        """Log it."""
        _logger.debug(POOLED, self.address)


NOT_HEARD = "Hints of %s can't be heard for now; waiters poll: %s"
POOLED = "%s is a pooler, which passes no hints on; waiters poll."
