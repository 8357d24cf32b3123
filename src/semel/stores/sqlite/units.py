"""Transactions on a SQLite file, for threads. One of them has the file's write lock, and the others of this process
wait for it here, in turn: left to SQLite, who asks most often would get it, and the rest would starve.
"""

from __future__ import annotations

import sqlite3
import threading
from typing import TypeVar

from semel.core.commands import Begin, Open
from semel.core.key import Key
from semel.core.record import Found
from semel.errors import StoreUnavailable
from semel.stores.forks import start_afresh_in_children
from semel.stores.sqlite import file
from semel.stores.sqlite.lent import Lender
from semel.stores.statement import Joined
from semel.stores.transaction import Connections, Unit

T = TypeVar("T")


class SQLiteUnit(Unit):
    """One transaction that has the write lock."""

    connection: sqlite3.Connection
    has_lock = True

    def __init__(self, connections: SQLiteConnections, connection: sqlite3.Connection, command: Begin | Open) -> None:
        """It is begun."""
        self.connection = connection
        self._connections = connections
        self._command = command

    def run(self, joined: Joined[T]) -> T:
        """Run one statement in the transaction."""
        return self._connections.lender.run(self.connection, joined)

    def commit(self) -> None:
        """Commit, and let go of the connection and of the turn."""
        try:
            self._connections.lender.commit(self.connection)
        finally:
            self._connections.end(self._command)

    def rollback(self) -> None:
        """Roll back, and let go of the connection and of the turn."""
        try:
            self._connections.lender.rollback(self.connection)
        finally:
            self._connections.end(self._command)


class SQLiteConnections(Connections):
    """Transactions on one file. What the handler gets is a plain ``sqlite3.Connection``."""

    def __init__(self, place: file.Place) -> None:
        """Nothing is opened yet."""
        self.lender = Lender(place)
        self.start_afresh()
        start_afresh_in_children(self)

    def start_afresh(self) -> None:
        """Have nobody waiting: in a child, whoever had the turn is not there to give it on."""
        self._turn = threading.Lock()
        self._holder = ""

    def begin(self, command: Begin | Open, opening: str | None = None) -> Unit | Found:  # noqa: ARG002 - PostgreSQL's
        """Wait for the turn and for the write lock, unless what is there makes them needless."""
        if isinstance(command, Begin) and (rival := self.lender.start(command)) is not None:
            return self.lender.peek(command) or rival
        try:
            found = self.lender.peek(command)
            begun = found or SQLiteUnit(self, self._begin(command), command)
        except BaseException:
            self.lender.stop(command)
            raise
        if found is not None:
            self.lender.stop(command)
        return begun

    def end(self, command: Begin | Open) -> None:
        """Let the next have its turn."""
        self.lender.stop(command)
        self._turn.release()

    def _begin(self, command: Begin | Open) -> sqlite3.Connection:
        if not self._turn.acquire(timeout=file.BUSY_TIMEOUT.total_seconds()):
            raise kept_waiting(self.lender.place, self._holder)
        try:
            connection = self.lender.begin()
        except BaseException:
            self._turn.release()
            raise
        self._holder = name(command)
        return connection

    def close(self) -> None:
        """Close the connections that nobody uses."""
        self.lender.close()


def name(command: Begin | Open) -> str:
    """Say whose transaction it is, to those who wait for it."""
    return f"that of key {Key(command.claim.key).short()}" if isinstance(command, Begin) else "that of a phase"


def kept_waiting(place: file.Place, holder: str) -> StoreUnavailable:
    """Say who kept the file to itself."""
    seconds = file.BUSY_TIMEOUT.total_seconds()
    return StoreUnavailable(
        f"{place.path} was kept locked for {seconds:.0f} s by a transaction of this process, {holder}. SQLite lets "
        "one write at a time: do what is slow before or after it."
    )
