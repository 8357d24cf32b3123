"""Transactions on a SQLite file, for an event loop. What can take long (to begin, and to commit) is done in a thread;
what the application does with the connection is its own affair.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from semel.core.commands import Begin, Open
from semel.core.record import Found
from semel.errors import ConfigurationError
from semel.stores.sqlite import file
from semel.stores.sqlite.lent import MAX_IDLE, Lender
from semel.stores.sqlite.units import kept_waiting, name
from semel.stores.statement import Joined
from semel.stores.transaction import AsyncConnections, AsyncUnit

T = TypeVar("T")


class AsyncSQLiteUnit(AsyncUnit):
    """One transaction that has the write lock."""

    connection: sqlite3.Connection
    has_lock = True

    def __init__(
        self, connections: AsyncSQLiteConnections, connection: sqlite3.Connection, command: Begin | Open
    ) -> None:
        """It is begun."""
        self.connection = connection
        self._connections = connections
        self._command = command

    async def run(self, joined: Joined[T]) -> T:
        """Run one statement in the transaction: on the loop, since it has the lock and nothing to wait for."""
        return self._connections.lender.run(self.connection, joined)

    async def commit(self) -> None:
        """Commit, and let go of the connection and of the turn. Cancelled in the middle, it goes on without us."""
        await self._end(self._connections.lender.commit)

    async def rollback(self) -> None:
        """Roll back, and let go of the connection and of the turn."""
        await self._end(self._connections.lender.rollback)

    async def _end(self, how: Callable[[sqlite3.Connection], None]) -> None:
        ending = self._connections.in_thread(partial(how, self.connection))
        # Cancelled, we are not there any more when the thread is through.
        ending.add_done_callback(lambda _: self._connections.end(self._command))
        await asyncio.shield(ending)


class AsyncSQLiteConnections(AsyncConnections):
    """Transactions on one file, for one event loop at a time. What the handler gets is a ``sqlite3.Connection``."""

    def __init__(self, place: file.Place) -> None:
        """Nothing is opened yet."""
        self.lender = Lender(place)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._holder = ""

    async def begin(self, command: Begin | Open, opening: str | None = None) -> AsyncUnit | Found:  # noqa: ARG002 - PostgreSQL's
        """Wait for the turn and for the write lock, unless what is there makes them needless."""
        if asyncio.get_running_loop() is not self._loop:
            self._start()
        if isinstance(command, Begin) and (rival := self.lender.start(command)) is not None:
            return await self.in_thread(partial(self.lender.peek, command)) or rival
        try:
            # Where nobody has the turn, one way to the thread is enough: there is looked first as well.
            found = await self.in_thread(partial(self.lender.peek, command)) if self._turn.locked() else None
            if found is None:
                await self._wait()
        except BaseException:
            self.lender.stop(command)
            raise
        if found is not None:
            self.lender.stop(command)
            return found
        return await self._begin(command)

    def in_thread(self, call: Callable[[], T]) -> asyncio.Future[T]:
        """Call it in a thread."""
        return asyncio.get_running_loop().run_in_executor(self._threads, call)

    def end(self, command: Begin | Open) -> None:
        """Let the next have its turn."""
        self.lender.stop(command)
        self._turn.release()

    async def close(self) -> None:
        """Close the connections that nobody uses."""
        if self._loop is not None:
            self._threads.shutdown(wait=False)
            self._loop = None
        self.lender.close()

    async def _wait(self) -> None:
        try:
            async with asyncio.timeout(file.BUSY_TIMEOUT.total_seconds()):
                await self._turn.acquire()
        except TimeoutError:
            raise kept_waiting(self.lender.place, self._holder) from None

    async def _begin(self, command: Begin | Open) -> AsyncUnit | Found:
        """Begin, the turn being ours. Cancelled, we leave it to the thread's end to give the turn on."""
        beginning = self.in_thread(partial(self._look_and_begin, command))
        try:
            begun = await asyncio.shield(beginning)
        except asyncio.CancelledError:
            beginning.add_done_callback(partial(self._undo, command))
            raise
        except BaseException:
            self.end(command)
            raise
        if isinstance(begun, Found):
            self.end(command)
            return begun
        self._holder = name(command)
        return AsyncSQLiteUnit(self, begun, command)

    def _look_and_begin(self, command: Begin | Open) -> sqlite3.Connection | Found:
        return self.lender.peek(command) or self.lender.begin()

    def _undo(self, command: Begin | Open, beginning: asyncio.Future[sqlite3.Connection | Found]) -> None:
        if not beginning.cancelled() and not beginning.exception():
            begun = beginning.result()
            if not isinstance(begun, Found):
                self.lender.rollback(begun)
        self.end(command)

    def _start(self) -> None:
        """Begin on the running loop. What another one left unfinished, nobody is going to finish."""
        if self._loop is not None and self._loop.is_running():
            raise ConfigurationError("This store is in use on another event loop. Give each loop a store of its own.")
        self._loop = asyncio.get_running_loop()
        self.lender.drop_all()
        self._turn = asyncio.Lock()
        # As many as can be of use: one begins or commits, the others look.
        self._threads = ThreadPoolExecutor(max_workers=MAX_IDLE, thread_name_prefix="semel-sqlite-unit")
