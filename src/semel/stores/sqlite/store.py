"""The SQLite store, sync and async. A replay is read in the caller's thread; all writes go to the one writer.

For the processes of one machine, not for a network folder.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from semel.core.commands import Claim, Command, Renew
from semel.core.record import Found, Hold
from semel.stores.base import AsyncStore, Store
from semel.stores.batching import Batcher
from semel.stores.dialect import Dialect
from semel.stores.forks import start_afresh_in_children
from semel.stores.migration import PlannedMigration
from semel.stores.sqlite.file import has_neighbours, locate, plan
from semel.stores.sqlite.transactions import AsyncSQLiteConnections, SQLiteConnections
from semel.stores.sqlite.writer import AsyncWriter, Reader, Writer
from semel.stores.step import Step
from semel.stores.transaction import AsyncConnections, AsyncTransaction, Connections, Transaction

T = TypeVar("T")

#: Threads that read at the same time. More would wait for the interpreter and not for the file.
MAX_READERS = 4


def _renew(writer: Writer, store: SQLiteStore | AsyncSQLiteStore, command: Renew) -> frozenset[Hold]:
    [outcome] = writer.execute([command], store.actor)
    if isinstance(outcome, Exception):
        raise outcome
    lost: frozenset[Hold] = outcome
    return lost


class SQLiteStore(Store):
    """Keys in a SQLite file: ``sqlite:///file.db``, ``sqlite:////folder/file.db``, ``sqlite:///file.db?table=name``."""

    def __init__(self, url: str, *, connections: Connections | None = None) -> None:
        """Nothing is opened yet. *connections* provide the transactions, if not the file itself."""
        self.place = locate(url)
        self._writer = Writer(self.place)
        self._readers = tuple(Reader(self.place, self._writer.statements) for _ in range(MAX_READERS))
        self._connections = connections or SQLiteConnections(self.place)
        self.notes_replays = self.place.audit == "replays"
        self.start_afresh()
        start_afresh_in_children(self)

    def perform(self, command: Command[T]) -> T:
        """Carry out one store command."""
        if isinstance(command, Claim) and (found := self._find(command)) is not None:
            return found  # type: ignore[return-value]  # by the command's own type
        return self._batcher.submit(command)  # type: ignore[no-any-return]  # as above

    def renewals(self) -> Callable[[Renew], frozenset[Hold]]:
        """Return what renews leases in this thread: users of the file take turns."""
        return partial(_renew, Writer(self.place), self)

    @property
    def dialect(self) -> Dialect:
        """SQLite, with these tables."""
        return self.place.dialect

    def transaction(self) -> Transaction:
        """Return a transaction for the application, on a ``sqlite3.Connection`` to the same file."""
        return Transaction(self._connections, self._writer.joins(self.actor))

    def open(self) -> None:
        """Open the file, and make the tables if there are none."""
        self._writer.open()

    def migrate(self) -> list[str]:
        """Bring the schema up to date; return what was applied."""
        return self._writer.open(with_post=self.migrates_post)

    def plan(self) -> tuple[PlannedMigration, ...]:
        """Return what ``migrate`` would do. No file is made."""
        return plan(self.place, with_post=self.migrates_post)

    def has_neighbours(self) -> bool:
        """Whether the file has other tables than Semel's."""
        return has_neighbours(self.place)

    def close(self) -> None:
        """Close the file. Using the store again opens it again."""
        self.ended.close()
        self._connections.close()
        for reader in self._readers:
            reader.close()
        # Last, since it can move the log's content into the file and delete the log.
        self._writer.close()

    def start_afresh(self) -> None:
        """Start with no waiting threads: in a child, the thread that leads the parent's batcher does not exist."""
        self._batcher: Batcher[Command[Any]] = Batcher(self._execute)

    def _find(self, claim: Claim) -> Found | None:
        if self._writer.opened is None:
            self._writer.prepare()
        free = (reader for reader in self._readers if not reader.lock.locked())
        reader = next(free, self._readers[threading.get_ident() % MAX_READERS])
        return reader.find(claim.scope, claim.key)

    def _execute(self, batch: list[Command[Any]]) -> list[Any]:
        return self._writer.execute(batch, self.actor, has_looked=True)


class AsyncSQLiteStore(AsyncStore):
    """Keys in a SQLite file: ``sqlite:///file.db``, ``sqlite:////folder/file.db``, ``sqlite:///file.db?table=name``."""

    def __init__(self, url: str, *, connections: AsyncConnections | None = None) -> None:
        """Nothing is opened yet. *connections* provide the transactions, if not the file itself."""
        self.place = locate(url)
        self._writer = Writer(self.place)
        self._reader = Reader(self.place, self._writer.statements)
        self._connections = connections or AsyncSQLiteConnections(self.place)
        self.notes_replays = self.place.audit == "replays"
        self._queue: AsyncWriter | None = None

    def perform(self, command: Command[T]) -> Step[T]:
        """Start one store command. It is carried out even if its caller does not wait for it."""
        return self._running().submit(command)

    def renew(self, command: Renew) -> frozenset[Hold]:
        """Renew leases, from any thread: users of the file take turns."""
        return _renew(self._writer, self, command)

    @property
    def dialect(self) -> Dialect:
        """SQLite, with these tables."""
        return self.place.dialect

    def transaction(self) -> AsyncTransaction:
        """Return a transaction for the application, on a ``sqlite3.Connection`` to the same file."""
        return AsyncTransaction(self._connections, self._writer.joins(self.actor))

    async def open(self) -> None:
        """Open the file, and make the tables if there are none."""
        await self._running().call(self._writer.open)

    async def close(self) -> None:
        """Close the file after all commands are done. Using the store again opens it again."""
        await self.ended.close()
        await self._connections.close()
        queue, self._queue = self._queue, None
        if queue is not None and queue.loop is asyncio.get_running_loop():
            await queue.idle()
            await queue.call(self._close)
            queue.stop()
        else:
            # The loop is closed, or this is a forked child: nothing of it waits any more.
            self._close()

    def _close(self) -> None:
        self._reader.close()
        self._writer.close()

    def _running(self) -> AsyncWriter:
        """Return the queue of the running loop. The loop changes in tests, and in a forked child."""
        if self._queue is None or self._queue.loop is not asyncio.get_running_loop():
            self._queue = AsyncWriter(self._writer, self._reader, lambda: self.actor)
        return self._queue
