"""Transactions for the application on connections to the file, sync and async. Which of Semel's statements
join them is in ``statements.py``.

As with the writer's, a connection must not be open during a fork: idle ones are closed before it, and those in use stay
the parent's. The child neither uses nor closes them, since either would undo the parent's work.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn, Self, TypeVar

from semel.core.commands import Begin, Open
from semel.core.key import Key
from semel.core.record import NO_TOKEN, Found
from semel.core.state import State
from semel.errors import CommitUnknown, ConfigurationError, StoreUnavailable
from semel.stores.forks import close_for_forks, start_afresh_in_children
from semel.stores.sqlite import file
from semel.stores.sqlite.file import FORK_PATIENCE, Place, connect, explained, is_migrated, migrate
from semel.stores.sqlite.statements import SQLiteJoins, Statements
from semel.stores.statement import Joined
from semel.stores.transaction import AsyncConnections, AsyncUnit, Connections, Unit

T = TypeVar("T")

#: Connections of each kind. One has the write lock, and the others read whether they need it.
MAX_IDLE = 4

_NOT_YOURS = "Semel ends this transaction, with its own record in it. Remove commit, rollback and `with connection`."

#: Errors of the data or the program, and not of the file.
_DATA = (sqlite3.IntegrityError, sqlite3.DataError, sqlite3.InterfaceError, sqlite3.ProgrammingError)

#: Connections that were in use when this process was forked.
_the_parents: list[sqlite3.Connection] = []


class HandlerConnection(sqlite3.Connection):
    """A connection of ``sqlite3`` that refuses to end its transaction: half of it would be committed."""

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
    """The connections of one store to one file, and the keys of this process's open transactions."""

    def __init__(self, place: Place) -> None:
        """Nothing is opened yet."""
        self.place = place
        self._statements = Statements(place.names)
        self._joins = SQLiteJoins(self._statements, None)
        self._is_migrated = False
        self._idle: list[sqlite3.Connection] = []
        #: Never given to a handler: a cursor that it did not read to its end would keep an old snapshot open.
        self._readers: list[sqlite3.Connection] = []
        self._in_use: set[sqlite3.Connection] = set()
        #: The fingerprints of running transactions, by key. Each is in its own list, so that equal ones differ.
        self._running: dict[tuple[str, str], list[bytes]] = {}
        self._opening = threading.Lock()
        self._is_forking = False
        self._pid = os.getpid()
        close_for_forks(self)

    def start(self, command: Begin) -> Found | None:
        """Note that a transaction of this process has a key; or return what another one has there."""
        claim = command.claim
        mine = [claim.fingerprint]
        first = self._running.setdefault((claim.scope, claim.key), mine)
        if first is mine:
            return None
        return Found(State.PROCESSING, 1, NO_TOKEN, first[0], None, lease_is_over=False, is_expired=False)

    def stop(self, command: object) -> None:
        """Note that it has ended, in any way."""
        if isinstance(command, Begin):
            self._running.pop((command.claim.scope, command.claim.key), None)

    @property
    def can_peek(self) -> bool:
        """Whether a connection for ``peek`` is open already."""
        return bool(self._readers)

    def peek(self, command: object) -> Found | None:
        """Read without the write lock whether it is not needed: there is an answer, or a worker with a live lease.

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
            raise explained(error, self.place) from error
        self._give_back(connection, self._readers)
        found = joined.read(rows).seen
        return found if isinstance(found, Found) and not found.may_be_taken else None

    def begin(self) -> sqlite3.Connection:
        """Return a connection that has the write lock, or raise after a time-out if another transaction keeps it.

        If the file is read-only, this raises here, before a handler runs.
        """
        connection = self._take(self._idle)
        try:
            try:
                connection.execute("BEGIN IMMEDIATE").close()
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode != sqlite3.SQLITE_BUSY_SNAPSHOT:
                    raise
                # Its last user has a cursor open that was not read to its end.
                self._drop(connection)
                self._in_use.add(connection := self._open())
                connection.execute("BEGIN IMMEDIATE").close()
            connection.execute(self._statements.write_nothing).close()
        except sqlite3.Error as error:
            self._drop(connection)
            raise explained(error, self.place) from error
        return connection

    def run(self, connection: sqlite3.Connection, joined: Joined[T]) -> T:
        """Run one statement in the transaction, and its follow-up."""
        try:
            if not connection.in_transaction:
                raise ConfigurationError(f"The transaction was ended in the middle. {_NOT_YOURS}")
            rows = self._rows(connection, joined)
            if rows and joined.also is not None:
                self._rows(connection, joined.also)
        except _DATA:
            raise
        except sqlite3.Error as error:
            raise explained(error, self.place) from error
        return joined.read(rows)

    def commit(self, connection: sqlite3.Connection) -> None:
        """Commit, and return the connection to the pool."""
        try:
            connection.execute("COMMIT").close()
        except sqlite3.IntegrityError:
            # A deferred constraint: SQLite reports it before it writes anything.
            self.rollback(connection)
            raise
        except sqlite3.Error as error:
            # The log may already have the complete commit, which the next process that opens the file will find.
            self._drop(connection)
            raise CommitUnknown(str(explained(error, self.place))) from error
        self._give_back(connection, self._idle)

    def rollback(self, connection: sqlite3.Connection) -> None:
        """Roll back, and return the connection to the pool. Never raises."""
        try:
            if connection.in_transaction:
                connection.execute("ROLLBACK").close()
        except sqlite3.Error:
            self._drop(connection)
        else:
            self._give_back(connection, self._idle)

    def close(self) -> None:
        """Close the idle connections."""
        for idle in (self._idle, self._readers):
            while idle:
                self._drop(idle.pop())

    def drop_all(self) -> None:
        """Close the connections in use, too: their users have gone."""
        self._running.clear()
        for connection in tuple(self._in_use):
            self._drop(connection)

    def before_fork(self) -> None:
        """Close the idle connections, and block new ones until the fork is over."""
        if self._opening.acquire(timeout=FORK_PATIENCE.total_seconds()):
            self._is_forking = True
            self.close()

    def after_fork_in_parent(self) -> None:
        """Go on."""
        if self._is_forking:
            self._is_forking = False
            self._opening.release()

    def after_fork_in_child(self) -> None:
        """Start without connections. The parent's stay referenced, since Python closes what is garbage collected."""
        _the_parents.extend((*self._in_use, *self._idle, *self._readers))
        self._idle, self._readers, self._in_use, self._running = [], [], set(), {}
        self._opening, self._is_forking, self._pid = threading.Lock(), False, os.getpid()

    def _take(self, idle: list[sqlite3.Connection]) -> sqlite3.Connection:
        if self._pid != os.getpid():
            # Forked by code outside of Python, which does not run the fork hooks.
            self.after_fork_in_child()
        try:
            connection = idle.pop()
        except IndexError:
            connection = self._open()
        self._in_use.add(connection)
        return connection

    def _give_back(self, connection: sqlite3.Connection, idle: list[sqlite3.Connection]) -> None:
        """Reset it and keep it for the next transaction; or close it."""
        if connection.in_transaction or len(idle) >= MAX_IDLE:
            self._drop(connection)
        else:
            self._in_use.discard(connection)
            connection.row_factory, connection.text_factory = None, str
            idle.append(connection)

    def _drop(self, connection: sqlite3.Connection) -> None:
        """Close it; what is not committed is rolled back."""
        self._in_use.discard(connection)
        with suppress(sqlite3.Error):
            connection.close()

    def _open(self) -> sqlite3.Connection:
        try:
            with self._opening:
                connection = connect(self.place.path, HandlerConnection)
                try:
                    if not self._is_migrated and not is_migrated(connection, self.place, self._statements):
                        migrate(connection, self.place, self._statements)
                    self._is_migrated = True
                except BaseException:
                    connection.close()
                    raise
        except sqlite3.Error as error:
            raise explained(error, self.place) from error
        return connection

    @staticmethod
    def _rows(connection: sqlite3.Connection, joined: Joined[Any]) -> list[Any]:
        cursor = connection.cursor()
        # Plain tuples, whatever row factory the application has set.
        cursor.row_factory = None
        return cursor.execute(joined.query.text, joined.parameters).fetchall()


class SQLiteUnit(Unit):
    """One transaction that has the write lock. The others of this process wait for it here, in a queue: SQLite would
    give the lock to the one that asks most often, and the others would starve.
    """

    connection: sqlite3.Connection
    has_lock = True

    def __init__(self, connections: SQLiteConnections, connection: sqlite3.Connection, command: Begin | Open) -> None:
        """Take a transaction that is begun already."""
        self.connection = connection
        self._connections = connections
        self._command = command

    def run(self, joined: Joined[T]) -> T:
        """Run one statement in the transaction."""
        return self._connections.lender.run(self.connection, joined)

    def commit(self) -> None:
        """Commit, and release the connection and the turn."""
        try:
            self._connections.lender.commit(self.connection)
        finally:
            self._connections.end(self._command)

    def rollback(self) -> None:
        """Roll back, and release the connection and the turn."""
        try:
            self._connections.lender.rollback(self.connection)
        finally:
            self._connections.end(self._command)


class SQLiteConnections(Connections):
    """Transactions on one file. What the handler gets is a plain ``sqlite3.Connection``."""

    def __init__(self, place: Place) -> None:
        """Nothing is opened yet."""
        self.lender = Lender(place)
        self.start_afresh()
        start_afresh_in_children(self)

    def start_afresh(self) -> None:
        """Start with no waiters: in a child, the thread that had the turn does not exist."""
        self._turn = threading.Lock()
        self._holder = ""

    def begin(self, command: Begin | Open, opening: str | None = None) -> Unit | Found:  # noqa: ARG002 - PostgreSQL's
        """Wait for the turn and for the write lock, unless what is there makes them unnecessary."""
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
        """Pass the turn on."""
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
        """Close the idle connections."""
        self.lender.close()


def name(command: Begin | Open) -> str:
    """Return a name of the transaction, for the message to those that wait for it."""
    return f"that of key {Key(command.claim.key).short()}" if isinstance(command, Begin) else "that of a phase"


def kept_waiting(place: Place, holder: str) -> StoreUnavailable:
    """Return the error that names the transaction which kept the file locked."""
    seconds = file.BUSY_TIMEOUT.total_seconds()
    return StoreUnavailable(
        f"{place.path} was kept locked for {seconds:.0f} s by a transaction of this process, {holder}. SQLite allows "
        "one writer at a time: do slow work before or after it."
    )


class AsyncSQLiteUnit(AsyncUnit):
    """One transaction that has the write lock."""

    connection: sqlite3.Connection
    has_lock = True

    def __init__(
        self, connections: AsyncSQLiteConnections, connection: sqlite3.Connection, command: Begin | Open
    ) -> None:
        """Take a transaction that is begun already."""
        self.connection = connection
        self._connections = connections
        self._command = command

    async def run(self, joined: Joined[T]) -> T:
        """Run one statement in the transaction: on the loop, since it has the lock and does not wait."""
        return self._connections.lender.run(self.connection, joined)

    async def commit(self) -> None:
        """Commit, and release the connection and the turn. It goes on to its end even if the caller is cancelled."""
        await self._end(self._connections.lender.commit)

    async def rollback(self) -> None:
        """Roll back, and release the connection and the turn."""
        await self._end(self._connections.lender.rollback)

    async def _end(self, how: Callable[[sqlite3.Connection], None]) -> None:
        ending = self._connections.in_thread(partial(how, self.connection))
        # If this is cancelled, it has gone when the thread is done.
        ending.add_done_callback(lambda _: self._connections.end(self._command))
        await asyncio.shield(ending)


class AsyncSQLiteConnections(AsyncConnections):
    """Transactions on one file, for one event loop at a time. What the handler gets is a ``sqlite3.Connection``."""

    def __init__(self, place: Place) -> None:
        """Nothing is opened yet."""
        self.lender = Lender(place)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._holder = ""

    async def begin(self, command: Begin | Open, opening: str | None = None) -> AsyncUnit | Found:  # noqa: ARG002 - PostgreSQL's
        """Wait for the turn and for the write lock, unless what is there makes them unnecessary."""
        if asyncio.get_running_loop() is not self._loop:
            self._start()
        if isinstance(command, Begin) and (rival := self.lender.start(command)) is not None:
            return await self._peek(command) or rival
        try:
            # If the turn is free, one call in the thread is enough: it peeks first, too.
            found = await self._peek(command) if self._turn.locked() or self.lender.can_peek else None
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
        """Pass the turn on."""
        self.lender.stop(command)
        self._turn.release()

    async def close(self) -> None:
        """Close the idle connections."""
        if self._loop is not None:
            self._threads.shutdown(wait=False)
            self._loop = None
        self.lender.close()

    async def _peek(self, command: Begin | Open) -> Found | None:
        # On an open connection it is one look-up, which the loop can do. Opening one is done in a thread.
        if self.lender.can_peek:
            return self.lender.peek(command)
        return await self.in_thread(partial(self.lender.peek, command))

    async def _wait(self) -> None:
        try:
            async with asyncio.timeout(file.BUSY_TIMEOUT.total_seconds()):
                await self._turn.acquire()
        except TimeoutError:
            raise kept_waiting(self.lender.place, self._holder) from None

    async def _begin(self, command: Begin | Open) -> AsyncUnit | Found:
        """Begin; this call has the turn. If it is cancelled, the turn is passed on when the thread is done."""
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
        """Begin on the running loop. Work that another loop left unfinished is dropped."""
        if self._loop is not None and self._loop.is_running():
            raise ConfigurationError("This store is in use on another event loop. Give each loop its own store.")
        self._loop = asyncio.get_running_loop()
        self.lender.drop_all()
        self._turn = asyncio.Lock()
        # As many as are useful: one begins or commits, the others peek.
        self._threads = ThreadPoolExecutor(max_workers=MAX_IDLE, thread_name_prefix="semel-sqlite-unit")
