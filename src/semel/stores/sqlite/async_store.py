"""The SQLite store for an event loop: a batch is one hop to the one thread that writes, and one hop back."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from semel.core.commands import Command, Renew
from semel.core.record import Hold
from semel.stores.base import AsyncStore
from semel.stores.lane import AsyncLane
from semel.stores.sqlite.async_units import AsyncSQLiteConnections
from semel.stores.sqlite.ledger import Ledger
from semel.stores.step import Step
from semel.stores.transaction import AsyncConnections, AsyncTransaction

T = TypeVar("T")


class AsyncSQLiteStore(AsyncStore):
    """Keys in a SQLite file: ``sqlite:///file.db``, ``sqlite:////folder/file.db``, ``sqlite:///file.db?table=name``."""

    def __init__(self, url: str, *, connections: AsyncConnections | None = None) -> None:
        """Nothing is opened yet. *connections* are where transactions come from, if not from the file itself."""
        self._ledger = Ledger(url)
        self.place = self._ledger.place
        self._connections = connections or AsyncSQLiteConnections(self._ledger.place)
        self.notes_replays = self._ledger.place.audit == "replays"
        self._loop: asyncio.AbstractEventLoop | None = None

    def perform(self, command: Command[T]) -> Step[T]:
        """Start one store command. It is carried out whether or not anybody waits for it."""
        if asyncio.get_running_loop() is not self._loop:
            self._start()
        return self._lane.submit(command)

    def renew(self, command: Renew) -> frozenset[Hold]:
        """Prolong leases, from any thread: those who use the file take turns."""
        [outcome] = self._ledger.execute([command], self.actor)
        if isinstance(outcome, Exception):
            raise outcome
        lost: frozenset[Hold] = outcome
        return lost

    def transaction(self) -> AsyncTransaction:
        """Return a transaction of the application's own, on a ``sqlite3.Connection`` to the same file."""
        return AsyncTransaction(self._connections, self._ledger.joins(self.actor))

    async def open(self) -> None:
        """Open the file, and make the tables where there are none."""
        if asyncio.get_running_loop() is not self._loop:
            self._start()
        await asyncio.get_running_loop().run_in_executor(self._thread, self._ledger.open)

    async def close(self) -> None:
        """Let go of the file once everything asked for is done. Using the store again opens it again."""
        await self._connections.close()
        if self._loop is not None and self._loop is asyncio.get_running_loop():
            await self._lane.idle()
            await self._loop.run_in_executor(self._thread, self._ledger.close)
            self._thread.shutdown()
            self._loop = None
        else:
            # The loop is gone, or it is a forked child's: what is left of it has nobody waiting.
            self._ledger.close()

    def _start(self) -> None:
        """Begin on the running loop. One loop is left for another in tests, and in a forked child."""
        self._loop = asyncio.get_running_loop()
        self._lane: AsyncLane[Command[Any]] = AsyncLane(self._execute)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="semel-sqlite")

    async def _execute(self, batch: list[Command[Any]]) -> list[Any]:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._ledger.execute, batch, self.actor)
