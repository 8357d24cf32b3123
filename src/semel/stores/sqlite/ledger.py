"""One connection to the file, for one thread at a time and one process only. Whose turn it is, is for the lanes to say.

A connection must not live through a fork. SQLite would take the parent's locks for the child's, which has none; when
the parent then closes the file, the log goes, and what the child commits afterwards is lost without an error. That was
measured. So every ledger lets go of its file before a fork, and opens it again when it is next asked.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakSet

from semel.core.commands import Command
from semel.errors import StoreUnavailable
from semel.stores.base import this_process
from semel.stores.sqlite.batch import Batch
from semel.stores.sqlite.file import connect, explained, is_busy, locate, migrate
from semel.stores.sqlite.joined import SQLiteJoins
from semel.stores.sqlite.statements import Statements

#: Longer than a batch can take, even one that waits for a locked file.
FORK_PATIENCE = timedelta(seconds=10)


class Ledger:
    """The keys in one file."""

    def __init__(self, url: str) -> None:
        """Nothing is opened yet."""
        self.place = locate(url)
        self.statements = Statements(self.place.names)
        self._connection: sqlite3.Connection | None = None
        self._opened_by = 0
        self._lock = threading.Lock()
        self._is_forking = False
        _ledgers.add(self)

    def execute(self, commands: Sequence[Command[Any]], actor: str | None = None) -> list[Any]:
        """Carry out *commands* in the name of *actor*; return one outcome for each, an exception where it failed.

        A transaction of the application's holds the file's write lock while its handler runs, in this process too.
        What is to be written waits for it, for ``BUSY_TIMEOUT`` at most; what is only read does not.
        """
        with self._lock:
            connection = self._opened()
            batch = Batch(connection, self.statements, commands, self._author(actor))
            try:
                batch.carry_out()
            except sqlite3.Error as error:
                if not is_busy(error) or connection.in_transaction:
                    # Closing rolls back, and a fresh connection is the cure for all that has one. But to open one takes
                    # the write lock: those who only read must not wait for it, too.
                    self._close()
                batch.fail(explained(error, self.place.path, was_sent=batch.is_committing))
            except BaseException:
                self._close()
                raise
            return batch.outcomes

    def joins(self, actor: str | None) -> SQLiteJoins:
        """Return the statements that join transactions of the application's, in the name of *actor*."""
        return SQLiteJoins(self.statements, self._author(actor))

    def open(self) -> list[str]:
        """Open the file, make or update its tables; return the migrations that were applied."""
        with self._lock:
            return self._open()[1] if self._connection is None else []

    def close(self) -> None:
        """Let go of the file, once whoever uses it is through."""
        with self._lock:
            self._close()

    def before_fork(self) -> None:
        """Let go of the file, and let nobody open it until the fork is over."""
        if self._lock.acquire(timeout=FORK_PATIENCE.total_seconds()):
            self._is_forking = True
            self._close()

    def after_fork_in_parent(self) -> None:
        """Go on."""
        if self._is_forking:
            self._is_forking = False
            self._lock.release()

    def after_fork_in_child(self) -> None:
        """Go on; whoever else held the lock is not in this process."""
        self._is_forking = False
        self._lock = threading.Lock()

    def _author(self, actor: str | None) -> str | None:
        if self.place.audit == "off":
            return None
        # A name that can't be written as text must not stop what it is the name of.
        return (actor or this_process()).encode("utf-8", "replace").decode()

    def _opened(self) -> sqlite3.Connection:
        if self._connection is None:
            return self._open()[0]
        if self._opened_by != os.getpid():
            # Forked by something that is not Python and tells it nothing.
            raise StoreUnavailable(
                f"{self.place.path} was open while this process was forked, and can't be used safely in it. "
                "Close the store before the fork."
            )
        return self._connection

    def _open(self) -> tuple[sqlite3.Connection, list[str]]:
        try:
            connection = connect(self.place.path)
            try:
                applied = migrate(connection, self.place, self.statements)
            except BaseException:
                connection.close()
                raise
        except sqlite3.Error as error:
            raise explained(error, self.place.path) from error
        self._connection, self._opened_by = connection, os.getpid()
        return connection, applied

    def _close(self) -> None:
        # Another process's is left as it is: closing it would undo what that process is doing.
        if self._connection is not None and self._opened_by == os.getpid():
            self._connection.close()
            self._connection = None


_ledgers: WeakSet[Ledger] = WeakSet()


def _tell(step: Callable[[Ledger], None]) -> Callable[[], None]:
    def tell_all() -> None:
        for ledger in tuple(_ledgers):
            step(ledger)

    return tell_all


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(
        before=_tell(Ledger.before_fork),
        after_in_parent=_tell(Ledger.after_fork_in_parent),
        after_in_child=_tell(Ledger.after_fork_in_child),
    )
