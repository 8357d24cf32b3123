"""Connections that are lent to the application for one transaction, and kept for the next. Whose turn it is, is for
``units.py`` and ``async_units.py`` to say.

As with the ledger's, a connection must not live through a fork: those that nobody uses are closed before it, and those
that are in use stay the parent's. The child neither uses nor closes them, since either would undo the parent's work.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn, Self, TypeVar
from weakref import WeakSet

from semel.core.commands import Begin
from semel.core.record import NOBODYS_TOKEN, Found
from semel.core.state import State
from semel.errors import CommitUnknown, ConfigurationError
from semel.stores.sqlite.file import Place, connect, explained, is_migrated, migrate
from semel.stores.sqlite.joined import SQLiteJoins
from semel.stores.sqlite.ledger import FORK_PATIENCE
from semel.stores.sqlite.statements import Statements
from semel.stores.statement import Joined

T = TypeVar("T")

#: Of each kind. One has the write lock, and the others read whether they need it.
MAX_IDLE = 4

_NOT_YOURS = "Semel ends this transaction, with its own record in it. Leave out commit, rollback and `with connection`."

#: The data's fault, or the program's; not the file's.
_DATA = (sqlite3.IntegrityError, sqlite3.DataError, sqlite3.InterfaceError, sqlite3.ProgrammingError)

#: What was in use when this process was forked.
_the_parents: list[sqlite3.Connection] = []


class LentConnection(sqlite3.Connection):
    """A connection of ``sqlite3`` whose transaction its user can't end in the usual ways: half of it would stay."""

    def commit(self) -> NoReturn:
        """Refuse."""
        raise ConfigurationError(_NOT_YOURS)

    def rollback(self) -> NoReturn:
        """Refuse."""
        raise ConfigurationError(_NOT_YOURS)

    def executescript(self, _script: str, /) -> NoReturn:
        """Refuse: it commits first."""
        raise ConfigurationError(f"executescript() commits. {_NOT_YOURS}")

    def __enter__(self) -> Self:
        """Refuse: the end of the block would commit."""
        raise ConfigurationError(_NOT_YOURS)


class Lender:
    """The connections of one store to one file, and the keys that transactions of this process are at."""

    def __init__(self, place: Place) -> None:
        """Nothing is opened yet."""
        self.place = place
        self._statements = Statements(place.names)
        self._joins = SQLiteJoins(self._statements, None)
        self._is_migrated = False
        self._idle: list[sqlite3.Connection] = []
        #: Never lent. A cursor that a handler did not read to its end would keep us reading what was there then.
        self._readers: list[sqlite3.Connection] = []
        self._in_use: set[sqlite3.Connection] = set()
        #: The fingerprints of what runs, by key. Each is in a list of its own, so that it can be told from its like.
        self._running: dict[tuple[str, str], list[bytes]] = {}
        self._opening = threading.Lock()
        self._is_forking = False
        self._pid = os.getpid()
        _lenders.add(self)

    def start(self, command: Begin) -> Found | None:
        """Set down that a transaction of this process is at a key; or say what another one is at there."""
        claim = command.claim
        mine = [claim.fingerprint]
        first = self._running.setdefault((claim.scope, claim.key), mine)
        if first is mine:
            return None
        return Found(State.PROCESSING, 1, NOBODYS_TOKEN, first[0], None, lease_is_over=False, is_expired=False)

    def stop(self, command: object) -> None:
        """Set down that it has ended, however it ended."""
        if isinstance(command, Begin):
            self._running.pop((command.claim.scope, command.claim.key), None)

    def peek(self, command: object) -> Found | None:
        """Read without the write lock what makes it needless: an answer, or a worker whose lease is not over.

        A replay must not wait for another request's handler, nor for another replay.
        """
        if not isinstance(command, Begin):
            return None
        connection = self._take(self._readers)
        try:
            joined = self._joins.begin(command)
            rows = connection.execute(joined.query.text, joined.parameters).fetchall()
        except sqlite3.Error as error:
            self._drop(connection)
            raise explained(error, self.place.path) from error
        self._give_back(connection, self._readers)
        found = joined.read(rows).seen
        return found if isinstance(found, Found) and not found.may_be_taken else None

    def begin(self) -> sqlite3.Connection:
        """Return a connection that has the write lock. Others, in this process too, give it back in time or do not.

        Where the file can only be read, that is known here, before a handler runs.
        """
        connection = self._take(self._idle)
        try:
            try:
                connection.execute("BEGIN IMMEDIATE").close()
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode != sqlite3.SQLITE_BUSY_SNAPSHOT:
                    raise
                # Its last user still reads with it, from a cursor that was not read to its end.
                self._drop(connection)
                self._in_use.add(connection := self._open())
                connection.execute("BEGIN IMMEDIATE").close()
            connection.execute(self._statements.write_nothing).close()
        except sqlite3.Error as error:
            self._drop(connection)
            raise explained(error, self.place.path) from error
        return connection

    def run(self, connection: sqlite3.Connection, joined: Joined[T]) -> T:
        """Run one statement in the transaction, and the one that follows from it."""
        try:
            if not connection.in_transaction:
                raise ConfigurationError(f"The transaction was ended in the middle. {_NOT_YOURS}")
            rows = self._rows(connection, joined)
            if rows and joined.also is not None:
                self._rows(connection, joined.also)
        except _DATA:
            raise
        except sqlite3.Error as error:
            raise explained(error, self.place.path) from error
        return joined.read(rows)

    def commit(self, connection: sqlite3.Connection) -> None:
        """Commit, and take the connection back."""
        try:
            connection.execute("COMMIT").close()
        except sqlite3.IntegrityError:
            # A constraint that is checked at the end: SQLite says so before it writes anything.
            self.rollback(connection)
            raise
        except sqlite3.Error as error:
            # What was written to the log before the trouble may be found there, whole, by whoever opens the file next.
            self._drop(connection)
            raise CommitUnknown(str(explained(error, self.place.path))) from error
        self._give_back(connection, self._idle)

    def rollback(self, connection: sqlite3.Connection) -> None:
        """Roll back, and take the connection back. Never raises."""
        try:
            if connection.in_transaction:
                connection.execute("ROLLBACK").close()
        except sqlite3.Error:
            self._drop(connection)
        else:
            self._give_back(connection, self._idle)

    def close(self) -> None:
        """Close what nobody uses."""
        for idle in (self._idle, self._readers):
            while idle:
                self._drop(idle.pop())

    def drop_all(self) -> None:
        """Close what is in use, too: those who used it are gone."""
        self._running.clear()
        for connection in tuple(self._in_use):
            self._drop(connection)

    def before_fork(self) -> None:
        """Close what nobody uses, and let nobody open more until the fork is over."""
        if self._opening.acquire(timeout=FORK_PATIENCE.total_seconds()):
            self._is_forking = True
            self.close()

    def after_fork_in_parent(self) -> None:
        """Go on."""
        if self._is_forking:
            self._is_forking = False
            self._opening.release()

    def after_fork_in_child(self) -> None:
        """Start without connections. The parent's must not even be forgotten, since Python closes what is forgotten."""
        _the_parents.extend((*self._in_use, *self._idle, *self._readers))
        self._idle, self._readers, self._in_use, self._running = [], [], set(), {}
        self._opening, self._is_forking, self._pid = threading.Lock(), False, os.getpid()

    def _take(self, idle: list[sqlite3.Connection]) -> sqlite3.Connection:
        if self._pid != os.getpid():
            # Forked by something that is not Python and tells it nothing.
            self.after_fork_in_child()
        try:
            connection = idle.pop()
        except IndexError:
            connection = self._open()
        self._in_use.add(connection)
        return connection

    def _give_back(self, connection: sqlite3.Connection, idle: list[sqlite3.Connection]) -> None:
        """Keep it for the next, as it was; or close it."""
        if connection.in_transaction or len(idle) >= MAX_IDLE:
            self._drop(connection)
        else:
            self._in_use.discard(connection)
            connection.row_factory, connection.text_factory = None, str
            idle.append(connection)

    def _drop(self, connection: sqlite3.Connection) -> None:
        """Close it; what is not committed is undone."""
        self._in_use.discard(connection)
        with suppress(sqlite3.Error):
            connection.close()

    def _open(self) -> sqlite3.Connection:
        try:
            with self._opening:
                connection = connect(self.place.path, LentConnection)
                try:
                    if not self._is_migrated and not is_migrated(connection, self.place, self._statements):
                        migrate(connection, self.place, self._statements)
                    self._is_migrated = True
                except BaseException:
                    connection.close()
                    raise
        except sqlite3.Error as error:
            raise explained(error, self.place.path) from error
        return connection

    @staticmethod
    def _rows(connection: sqlite3.Connection, joined: Joined[Any]) -> list[Any]:
        cursor = connection.cursor()
        # Rows as they come, whatever the application would like its own to be.
        cursor.row_factory = None
        return cursor.execute(joined.query.text, joined.parameters).fetchall()


_lenders: WeakSet[Lender] = WeakSet()


def _tell(step: Callable[[Lender], None]) -> Callable[[], None]:
    def tell_all() -> None:
        for lender in tuple(_lenders):
            step(lender)

    return tell_all


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(
        before=_tell(Lender.before_fork),
        after_in_parent=_tell(Lender.after_fork_in_parent),
        after_in_child=_tell(Lender.after_fork_in_child),
    )
