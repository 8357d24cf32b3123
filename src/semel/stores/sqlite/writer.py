"""The one connection that writes, and batches of commands on it. The commands themselves are in ``commands.py``.

A write that the table refuses fails alone, and the others in the batch go on; an error of the file fails them all, and
the whole transaction is rolled back. A replay is read by a ``Reader``, and needs no write lock.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from copy import copy
from datetime import timedelta
from typing import Any

from semel.core.commands import (
    AddCounts,
    Claim,
    Command,
    Complete,
    Look,
    Mark,
    Note,
    Now,
    Park,
    ReadCounts,
    ReadRequest,
    Release,
    Save,
    Settle,
    TakeOver,
)
from semel.core.record import Found
from semel.errors import StoreError, StoreNotReady, StoreUnavailable
from semel.stores.base import this_process
from semel.stores.batching import refused
from semel.stores.fair_queue import FairQueue, size_of
from semel.stores.sqlite import file
from semel.stores.sqlite.commands import READS, WRITES, Commands, Item, Items, Session, Table
from semel.stores.sqlite.file import (
    Connection,
    Place,
    connect,
    connect_to_read,
    explained,
    is_busy,
    is_migrated,
    is_outdated,
    migrate,
)
from semel.stores.sqlite.statements import MAX_ROWS, MIN_GATHERED, SQLiteJoins, Statements, chunks, read_found
from semel.stores.step import Step

#: Errors of the row, and not of the file: a constraint, or a value that SQLite can't store.
_ROW_REFUSED = (
    sqlite3.IntegrityError,
    sqlite3.DataError,
    sqlite3.InterfaceError,
    sqlite3.ProgrammingError,
    AttributeError,
    LookupError,
    OverflowError,
    TypeError,
    ValueError,
)

#: Commands that an event loop carries out itself, except the COMMIT: each reads and writes one record, by its key.
_SHORT = frozenset({Claim, Complete, Look, Mark, Note, Now, Park, ReadRequest, Release, Save, Settle, TakeOver})
_IN_BULK = frozenset({Claim, Complete})
#: Commands about a table that may be missing: no request depends on it.
_OF_COUNTS = frozenset({AddCounts, ReadCounts})
#: Bytes of bodies that an event loop copies into the file's pages by itself: a fraction of a millisecond.
MAX_BYTES_ON_LOOP = 64 * 1024


class Batch:
    """One batch, carried out once."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        statements: Statements,
        commands: Sequence[Command[Any]],
        actor: str | None = None,
        *,
        is_full: bool = False,
        has_looked: bool = False,
    ) -> None:
        """Nothing happens yet. Without an *actor* there is no audit trail; with *is_full*, it has every change.

        *has_looked*: claims were looked up just now, and their keys were free.
        """
        self.outcomes: list[Any] = [None] * len(commands)
        #: Whether COMMIT was sent: if that fails, it may have been carried out nevertheless.
        self.is_committing = False
        #: Whether a transaction was begun.
        self.is_begun = False
        #: The places of the commands that have no lasting outcome yet.
        self._open: Sequence[int] = range(len(commands))
        self._has_looked = has_looked
        self._session = Session(connection, statements, actor, is_full=is_full)
        self._commands = Commands(self._session, self.outcomes)
        self._kinds: defaultdict[type[Command[Any]], list[Item]] = defaultdict(list)
        for place, command in enumerate(commands):
            self._kinds[type(command)].append((place, command))
        self._has_bulk_only = self._kinds.keys() <= _IN_BULK

    def carry_out(self) -> None:
        """Carry out the commands, and fill in their outcomes."""
        if self.read():
            self.begin()
            self.write()
            self.commit()

    def read(self) -> bool:
        """Answer the commands that only read; return whether anything has to be written. It takes no write lock."""
        claims = self._kinds.get(Claim, [])
        self._each(READS)
        if not self._has_looked:
            self._in_bulk(self._commands.find, claims)
            self._kinds[Claim] = claims = [item for item in claims if self.outcomes[item[0]] is None]
        rest = [item for kind, items in self._kinds.items() if kind in WRITES for item in items]
        self._open = [place for place, _ in (*claims, *self._kinds.get(Complete, ()), *rest)]
        return bool(self._open)

    def begin(self) -> None:
        """Take the write lock."""
        self._session.run("BEGIN IMMEDIATE")
        self.is_begun = True

    def write(self) -> None:
        """Do everything but COMMIT."""
        # Claims come first: of a claim and a release by one caller, the claim is the earlier one.
        for group in _by_terms(self._kinds.get(Claim, [])):
            self._in_bulk(self._commands.claim, group)
        self._in_bulk(self._commands.complete, self._kinds.get(Complete, []), MIN_GATHERED)
        self._each(WRITES)
        self._session.write_down()

    def commit(self) -> None:
        """End the transaction."""
        self.is_committing = True
        self._session.run("COMMIT")

    def fail(self, error: Exception) -> None:
        """Give *error* to every command that has no lasting outcome."""
        self.is_begun = False
        for place in self._open:
            self.outcomes[place] = error

    def _in_bulk(self, carry_out: Callable[[Items], None], items: Items, least: int = 1) -> None:
        # If every change has a line in the trail, it must be known of each command whether it changed anything.
        for chunk in chunks(items, MAX_ROWS + 1 if self._session.is_full else least):
            try:
                carry_out(chunk)
            except _ROW_REFUSED as error:
                if len(chunk) == 1:
                    self.outcomes[chunk[0][0]] = refused(error)
                else:
                    for item in chunk:
                        self._in_bulk(carry_out, [item])

    def _each(self, table: Table) -> None:
        if self._has_bulk_only:
            return
        for kind, carry_out in table.items():
            for place, command in self._kinds.get(kind, ()):
                try:
                    self.outcomes[place] = carry_out(self._commands, command)
                except _ROW_REFUSED as error:
                    self.outcomes[place] = refused(error)
                except sqlite3.OperationalError as error:
                    if kind not in _OF_COUNTS or not is_outdated(error):
                        raise
                    # Nothing has begun of it, and what else is in the batch needs no such table.
                    self.outcomes[place] = StoreNotReady(f"The file has no table for counts by minute ({error}).")


def _by_terms(claims: Items) -> Sequence[Items]:
    groups: defaultdict[Any, list[Item]] = defaultdict(list)
    for item in claims:
        claim: Claim = item[1]
        terms = (
            claim.lease,
            claim.retention,
            claim.on_crash,
            claim.after_retention,
            claim.is_accepted,
            claim.made_at,
        )
        groups[terms].append(item)
    return list(groups.values())


class Reader(Connection):
    """A connection that only reads what is there under a key, as of the last commit."""

    def __init__(self, place: Place, statements: Statements) -> None:
        """Nothing is opened yet."""
        super().__init__(place)
        self._statements = statements

    def find(self, scope: str, key: str) -> Found | None:
        """Read what is there under one key. None: nothing is there; or it can't be read, and the writer will report
        the error.
        """
        with self.lock:
            rows = self._rows(self._statements.find, (scope, key))
        return read_found(rows[0]) if rows else None

    def find_all(self, claims: Sequence[Claim]) -> list[Found | None]:
        """Read what is there under many keys, at once. An event loop may do it, since each is a look-up by the primary
        key, in pages that are mostly in memory.

        A statement is a transaction of its own, so that it sees every commit that was reported before it began.
        """
        found: list[Found | None] = [None] * len(claims)
        if not self.lock.acquire(blocking=False):
            return found
        try:
            for chunk in chunks(range(len(claims))):
                if len(chunk) == 1:
                    claim = claims[chunk[0]]
                    rows = self._rows(self._statements.find, (claim.scope, claim.key))
                    found[chunk[0]] = read_found(rows[0]) if rows else None
                    continue
                wanted = [value for place in chunk for value in (place, claims[place].scope, claims[place].key)]
                for row in self._rows(self._statements.find_all.of(len(chunk)), wanted):
                    found[row[-1]] = read_found(row[:-1])
        finally:
            self.lock.release()
        return found

    def _rows(self, sql: str, parameters: Sequence[Any]) -> list[Any]:
        if self.opened is not None and self.opened_by != os.getpid():
            return []
        try:
            if self.opened is None:
                self.keep(connect_to_read(self.place.path))
            return self.opened.execute(sql, parameters).fetchall()  # type: ignore[union-attr]  # it is open
        except sqlite3.Error:
            self.close_now()
        except ValueError:
            pass  # A scope or key that can't be encoded in UTF-8.
        return []


class Writer(Connection):
    """The connection that writes. Threads use it one at a time: the lock is held from BEGIN to COMMIT."""

    def __init__(self, place: Place) -> None:
        """Nothing is opened yet."""
        super().__init__(place)
        self.statements = Statements(place.names)

    def execute(
        self, commands: Sequence[Command[Any]], actor: str | None = None, *, has_looked: bool = False
    ) -> list[Any]:
        """Carry out *commands* in the name of *actor*; return one outcome for each, an exception where it failed.

        A transaction of the application holds the file's write lock while its handler runs, in this process, too.
        Writes wait for it, for ``BUSY_TIMEOUT`` at most; reads do not.
        """
        with self.lock:
            batch = self._batch(self._usable(), commands, actor, has_looked=has_looked)
            self._try(batch, batch.carry_out)
            return batch.outcomes

    def start(self, commands: Sequence[Command[Any]], actor: str | None = None) -> Batch | None:
        """Carry out *commands* except the COMMIT; pass the batch to ``finish`` for that. None: this would have to wait
        for a lock, or the file is not open, and nothing was done.

        This is for an event loop: nothing here waits for the disk or for locks. In a thread next to a busy loop, every
        statement would wait for the interpreter instead.
        """
        if not self.lock.acquire(blocking=False):
            return None
        is_ours = False
        try:
            connection = self.opened
            if connection is None or self.opened_by != os.getpid():
                return None
            batch = self._batch(connection, commands, actor, has_looked=True)
            if not self._begin_at_once(connection, batch):
                return None
            if batch.is_begun:
                self._try(batch, batch.write)
            is_ours = batch.is_begun
            return batch
        finally:
            if not is_ours:
                self.lock.release()

    def finish(self, batch: Batch) -> None:
        """Commit what was started, in a thread: it waits for the disk."""
        try:
            self._try(batch, batch.commit)
        finally:
            self.lock.release()

    def open(self, *, with_post: bool = False) -> list[str]:
        """Open the file, make or update its tables; return the migrations that were applied."""
        with self.lock:
            return self._open(with_post=with_post)[1] if self.opened is None else []

    def prepare(self) -> None:
        """Open the file for a command. Where its tables are there, this waits for no write lock."""
        with self.lock:
            self._usable()

    def joins(self, actor: str | None) -> SQLiteJoins:
        """Return the statements that join the application's transactions, in the name of *actor*."""
        return SQLiteJoins(self.statements, self._author(actor), is_full=self.place.is_full)

    def _batch(
        self, connection: sqlite3.Connection, commands: Sequence[Command[Any]], actor: str | None, *, has_looked: bool
    ) -> Batch:
        author, is_full = self._author(actor), self.place.is_full
        return Batch(connection, self.statements, commands, author, is_full=is_full, has_looked=has_looked)

    def _try(self, batch: Batch, act: Callable[[], None]) -> None:
        try:
            act()
        except sqlite3.Error as error:
            if not is_busy(error) or (self.opened is not None and self.opened.in_transaction):
                # Closing rolls back, and a new connection helps if anything does. But opening one takes the write lock,
                # and reads must not wait for that.
                self.close_now()
            batch.fail(explained(error, self.place, was_sent=batch.is_committing))
        except BaseException:
            self.close_now()
            raise

    def _begin_at_once(self, connection: sqlite3.Connection, batch: Batch) -> bool:
        """Begin, if there is anything to write and the write lock is free. Other errors are found in the thread."""
        try:
            if not batch.read():
                return True
            connection.execute("PRAGMA busy_timeout = 0").close()
            try:
                batch.begin()
            finally:
                connection.execute(f"PRAGMA busy_timeout = {_busy_milliseconds()}").close()
        except sqlite3.Error:
            if connection.in_transaction:
                self.close_now()
            return False
        return True

    def _author(self, actor: str | None) -> str | None:
        if self.place.audit == "off":
            return None
        # An actor's name that can't be encoded must not make the command fail.
        return (actor or this_process()).encode("utf-8", "replace").decode()

    def _usable(self) -> sqlite3.Connection:
        if self.opened is None:
            return self._open(is_asked=False)[0]
        if self.opened_by != os.getpid():
            # Forked by code outside of Python, which does not run the fork hooks.
            raise StoreUnavailable(
                f"{self.place.path} was open while this process was forked, and can't be used safely in it. "
                "Close the store before the fork."
            )
        return self.opened

    def _open(self, *, with_post: bool = False, is_asked: bool = True) -> tuple[sqlite3.Connection, list[str]]:
        applied: list[str] = []
        try:
            connection = connect(self.place.path)
            try:
                # A command that only reads must not wait for the write lock, which a handler may hold for long.
                if is_asked or not is_migrated(connection, self.place, self.statements):
                    applied = migrate(connection, self.place, self.statements, with_post=with_post)
            except BaseException:
                connection.close()
                raise
        except sqlite3.Error as error:
            raise explained(error, self.place) from error
        self.keep(connection)
        return connection, applied


class AsyncWriter:
    """The writer for the tasks of one event loop: commands that arrive during a COMMIT go into the next batch.

    The loop carries out the statements, and the one thread commits. Anything that may take longer is done in the
    thread. Claims are looked up first, all those of one turn of the loop together: most of them are replays, or busy,
    and need no writer.
    """

    def __init__(self, writer: Writer, reader: Reader, actor: Callable[[], str | None]) -> None:
        """Serve the running loop, in the name of *actor*."""
        self.loop = asyncio.get_running_loop()
        self._writer = writer
        self._reader = reader
        self._claims: list[tuple[Claim, Step[Any]]] = []
        self._actor = actor
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="semel-sqlite")
        self._queue: FairQueue[_Asked] = FairQueue()
        self._is_busy = False
        self._waiting: list[asyncio.Future[None]] = []

    def submit(self, command: Command[Any]) -> Step[Any]:
        """Queue *command*. It is carried out even if the caller is cancelled."""
        answer: Step[Any] = Step(loop=self.loop)
        # Both at the end of this turn of the loop: more commands may arrive in it.
        if isinstance(command, Claim) and self._writer.opened is not None:
            if not self._claims:
                self.loop.call_soon(self._look)
            self._claims.append((command, answer))
            return answer
        self._queue.append(command, (command, answer))
        self._wake()
        return answer

    async def call(self, act: Callable[[], Any]) -> None:
        """Call *act* in the thread."""
        await self.loop.run_in_executor(self._thread, act)

    async def idle(self) -> None:
        """Wait until everything that was submitted has been carried out."""
        while self._is_busy or self._claims:
            self._look()
            if not self._is_busy:
                return
            self._waiting.append(self.loop.create_future())
            await self._waiting[-1]

    def stop(self) -> None:
        """End the thread, which has nothing left to do."""
        self._thread.shutdown()

    def _wake(self) -> None:
        if not self._is_busy:
            self._is_busy = True
            self.loop.call_soon(self._next)

    def _look(self) -> None:
        claims, self._claims = self._claims, []
        if not claims:
            return
        there: list[Found | None] = [None] * len(claims)
        # After a failed read the writer answers each command: no caller may wait for ever.
        with suppress(Exception):
            there = self._reader.find_all([claim for claim, _ in claims])
        for (claim, answer), found in zip(claims, there, strict=True):
            if found is not None:
                answer.settle(found)
            else:
                self._queue.append(claim, (claim, answer))
        if self._queue:
            self._wake()

    def _next(self) -> None:
        # A claim that waits to be looked up comes before its own release, which may be in the queue.
        self._look()
        if not self._queue:
            self._rest()
            return
        asked = self._queue.take()
        # Small commands go out together, for one wait for the disk; large ones in the order of the queue.
        while self._queue and len(asked) < MAX_ROWS and _is_small(asked):
            asked += self._queue.take()
        commands = [command for command, _ in asked]
        is_short = _is_small(asked) and all(type(command) in _SHORT for command in commands)
        try:
            batch = self._writer.start(commands, self._actor()) if is_short else None
        except Exception as error:  # noqa: BLE001 - no caller may wait for ever
            self._settle(asked, [refused(error) for _ in asked])
        else:
            if batch is None:
                self._thread.submit(self._execute, asked, commands)
            elif batch.is_begun:
                self._thread.submit(self._commit, asked, batch)
            else:
                self._settle(asked, batch.outcomes)

    def _commit(self, asked: list[_Asked], batch: Batch) -> None:
        try:
            self._writer.finish(batch)
        except Exception as error:  # noqa: BLE001 - as above
            batch.fail(refused(error))
        self._post(asked, batch.outcomes)

    def _execute(self, asked: list[_Asked], commands: list[Command[Any]]) -> None:
        outcomes: list[Any]
        try:
            # Before the file is open, claims are not looked up on the loop.
            has_looked = self._writer.opened is not None
            outcomes = self._writer.execute(commands, self._actor(), has_looked=has_looked)
        except StoreError as error:
            outcomes = [copy(error) for _ in asked]
        except Exception as error:  # noqa: BLE001 - as above
            outcomes = [refused(error) for _ in asked]
        self._post(asked, outcomes)

    def _post(self, asked: list[_Asked], outcomes: list[Any]) -> None:
        with suppress(RuntimeError):  # The loop is closed, and so are the tasks that waited.
            self.loop.call_soon_threadsafe(self._settle, asked, outcomes)

    def _settle(self, asked: list[_Asked], outcomes: list[Any]) -> None:
        for (_, answer), outcome in zip(asked, outcomes, strict=True):
            answer.settle(outcome)
        if self._queue:
            # Before the tasks that have their outcome go on, so that the disk works meanwhile.
            self._next()
        else:
            self._rest()

    def _rest(self) -> None:
        self._is_busy = False
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            each.set_result(None)


_Asked = tuple[Command[Any], Step[Any]]


def _is_small(asked: list[_Asked]) -> bool:
    return sum([size_of(command) for command, _ in asked]) <= MAX_BYTES_ON_LOOP


def _busy_milliseconds() -> int:
    return file.BUSY_TIMEOUT // timedelta(milliseconds=1)
