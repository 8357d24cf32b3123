"""The connection over which the leases of event loops are renewed, from a thread. What is said on it, others say.

It is opened as every other connection of its store is, by the same driver and with the same settings, so it has an
event loop of its own, which runs only while a statement does. The application's may be blocked meanwhile.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Protocol, TypeVar

from semel.stores.forks import leave_alone, start_afresh_in_children
from semel.stores.statement import Statement

T = TypeVar("T")


class Link(Protocol):
    """One connection, opened when it is needed and opened again when it is lost."""

    async def run(self, statement: Statement[T]) -> T:
        """Run one statement in its own transaction."""

    async def close(self) -> None:
        """Disconnect."""


class Renewals:
    """One connection, for one thread at a time. It forgets its parent's in a forked child, and *link* does so too."""

    _mutex: threading.Lock
    _loop: asyncio.AbstractEventLoop | None = None

    def __init__(self, link: Link) -> None:
        """Connect through *link* on first use."""
        self._link = link
        self.start_afresh()
        start_afresh_in_children(self)

    def run(self, statement: Statement[T]) -> T:
        """Run one statement, and wait for it in this thread, which is no event loop's."""
        with self._mutex:
            if self._loop is None:
                # Python's own, whatever the application's is: what is written in C may not be stopped in a thread
                # that ends with the process.
                self._loop = asyncio.SelectorEventLoop()
            return self._loop.run_until_complete(self._link.run(statement))

    @property
    def is_used(self) -> bool:
        """Whether there may be a connection to close."""
        return self._loop is not None

    def close(self) -> None:
        """Disconnect, once a statement that is under way has ended. Running another connects again."""
        with self._mutex:
            loop, self._loop = self._loop, None
            if loop is not None:
                loop.run_until_complete(self._link.close())
                loop.close()

    def start_afresh(self) -> None:
        """Have no loop: to close the parent's would be to take it out of the parent's hands."""
        leave_alone(self._loop)
        self._loop = None
        self._mutex = threading.Lock()
