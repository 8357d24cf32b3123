"""SQLite in Django, in a file or in memory: what ``stores/sqlite`` does, on Django's own connection.

The file's settings (its journal, its lock time-out) are the project's, and are not changed.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar, cast

from django.db import Error as DjangoError

from semel.core.commands import Begin, Command, Open
from semel.core.record import Found
from semel.core.trail import FULL, Audit
from semel.errors import CommitUnknown, ConfigurationError, StoreError, StoreUnavailable
from semel.stores.django.turns import Turns, turns_of
from semel.stores.django.units import Database, no_tables
from semel.stores.django.wrapper import Block, Wrapper, close, name_of
from semel.stores.sqlite.file import OLDEST_SQLITE, Place, check_name, explained, is_busy, is_migrated, is_outdated
from semel.stores.sqlite.statements import SQLiteJoins, Statements
from semel.stores.sqlite.transactions import name
from semel.stores.sqlite.writer import Batch
from semel.stores.statement import Joined, Names

T = TypeVar("T")

#: Errors of the data or the program, and not of the file.
_DATA = (sqlite3.IntegrityError, sqlite3.DataError, sqlite3.InterfaceError, sqlite3.ProgrammingError)

_BEGIN = "BEGIN IMMEDIATE"
_SAVEPOINT = {_BEGIN: "SAVEPOINT semel", "COMMIT": "RELEASE semel"}

#: Ways to begin that take the write lock at once.
_LOCKING = frozenset({"IMMEDIATE", "EXCLUSIVE"})


class SQLite(Database):
    """One SQLite database of Django."""

    def __init__(self, alias: str, *, audit: Audit, actor: Callable[[], str]) -> None:
        """Nothing is connected yet."""
        if sqlite3.sqlite_version_info < OLDEST_SQLITE:
            needed = ".".join(map(str, OLDEST_SQLITE))
            raise ConfigurationError(f"SQLite {needed} or newer is needed; this Python has {sqlite3.sqlite_version}.")
        self._alias = alias
        self._statements = Statements(Names())
        self._has_audit = audit != "off"
        self._is_full = audit in FULL
        self._actor = actor
        self._turns = turns_of(alias)

    def connect(self, wrapper: Wrapper) -> None:
        """Connect, and check that the driver is the module ``sqlite3``."""
        is_new = wrapper.connection is None
        try:
            wrapper.ensure_connection()
        except DjangoError as error:
            raise StoreUnavailable(f"{name_of(wrapper)} can't be opened: {error}") from error
        if is_new:
            check_name(place_of(wrapper).path)
        if not isinstance(wrapper.connection, sqlite3.Connection):
            raise ConfigurationError(f"{name_of(wrapper)} does not use Python's sqlite3, which Semel needs.")

    def carry_out(self, wrapper: Wrapper, command: Command[T], *, is_nested: bool) -> T:
        """Carry out one command, as a batch of one."""
        rows = _Nested(wrapper.connection) if is_nested else _InTurn(wrapper, self._turns)
        connection = cast("sqlite3.Connection", rows)
        batch = Batch(connection, self._statements, [command], self._author(), is_full=self._is_full)
        try:
            batch.carry_out()
        except sqlite3.Error as error:
            rows.undo(wrapper)
            raise self._explained(wrapper, error, was_sent=batch.is_committing) from error
        except BaseException:
            rows.undo(wrapper)
            raise
        finally:
            rows.end()
        outcome = batch.outcomes[0]
        if isinstance(outcome, Exception):
            raise outcome
        return cast("T", outcome)

    def check(self, wrapper: Wrapper) -> None:
        """Raise if the tables are missing, or are read-only."""
        rows = _Rows(wrapper.connection)
        try:
            if not is_migrated(cast("sqlite3.Connection", rows), place_of(wrapper), self._statements):
                raise no_tables(self._alias)
            rows.execute(self._statements.write_nothing).close()
        except sqlite3.Error as error:
            if not is_busy(error):  # Another process writes, so it can be written.
                raise self._explained(wrapper, error) from error

    def joined(self) -> SQLiteJoins:
        """Return the statements that join."""
        return SQLiteJoins(self._statements, self._author(), is_full=self._is_full)

    def start(self, wrapper: Wrapper, command: Begin | Open) -> Found | None:
        """Note the key of this transaction, and wait for the turn. Another request with the same key gets a result at
        once, and a replay does not wait for another request's handler.
        """
        rival = self._turns.start(command)
        if rival is not None:
            return self._peek(wrapper, command) or rival
        try:
            found = self._peek(wrapper, command)
            if found is None:
                self._turns.take(name(command), place_of(wrapper))
        except BaseException:
            self._turns.stop(command)
            raise
        if found is not None:
            self._turns.stop(command)
        return found

    def stop(self, command: Begin | Open) -> None:
        """Pass the turn on."""
        self._turns.stop(command)
        self._turns.give_on()

    def begin(self, wrapper: Wrapper, block: Block, command: Begin | Open) -> None:  # noqa: ARG002 - the same for both
        """Enter the block with the write lock: a transaction that reads before it writes can be too late to write."""
        is_nested = wrapper.in_atomic_block
        try:
            block.__enter__()
        except DjangoError as error:
            raise self._explained(wrapper, _origin(error)) from error
        try:
            if not (is_nested or getattr(wrapper, "transaction_mode", None) in _LOCKING):
                # Nothing was done in it yet.
                wrapper.connection.execute("ROLLBACK").close()
                wrapper.connection.execute(_BEGIN).close()
            # If the file is read-only, this raises now, before a handler runs.
            wrapper.connection.execute(self._statements.write_nothing).close()
        except sqlite3.Error as error:
            raise self._explained(wrapper, error) from error

    def is_lost(self, wrapper: Wrapper) -> bool:
        """Whether the handler has closed the connection."""
        return wrapper.connection is None or bool(wrapper.closed_in_transaction)

    def is_over(self, wrapper: Wrapper) -> bool:
        """Whether a COMMIT or ROLLBACK was sent as a statement."""
        return not wrapper.connection.in_transaction

    def has_failed(self, wrapper: Wrapper) -> bool:  # noqa: ARG002 - PostgreSQL's concern
        """Return False: SQLite rolls back only the statement that failed."""
        return False

    def run(self, wrapper: Wrapper, joined: Joined[T]) -> T:
        """Run one statement in the transaction, and the one that follows from it."""
        rows = _Rows(wrapper.connection)
        try:
            found = rows.execute(joined.query.text, joined.parameters).fetchall()
            if found and joined.also is not None:
                rows.execute(joined.also.query.text, joined.also.parameters).fetchall()
        except _DATA:
            raise
        except sqlite3.Error as error:
            raise self._explained(wrapper, error) from error
        return joined.read(found)

    def commit(self, wrapper: Wrapper) -> None:
        """Say COMMIT."""
        try:
            wrapper.connection.execute("COMMIT").close()
        except sqlite3.IntegrityError:
            # A constraint that is checked at the end: SQLite says so before it writes anything.
            with wrapper.wrap_database_errors:
                raise
        except sqlite3.Error as error:
            known = self._explained(wrapper, error)
            if is_busy(error):
                # Others are reading, and it has not begun to write.
                raise known from error
            close(wrapper)
            raise CommitUnknown(str(known)) from error

    def lost(self) -> StoreError:
        """Say that the handler has closed the connection."""
        return StoreUnavailable(f'DATABASES["{self._alias}"] was closed inside the handler; nothing was written.')

    def _peek(self, wrapper: Wrapper, command: Begin | Open) -> Found | None:
        """Read whether the write lock is not needed: there is an answer, or a worker with a live lease."""
        if not isinstance(command, Begin):
            return None
        found = self.run(wrapper, self.joined().begin(command)).seen
        return found if isinstance(found, Found) and not found.may_be_taken else None

    def _author(self) -> str | None:
        return self._actor() if self._has_audit else None

    def _explained(self, wrapper: Wrapper, error: sqlite3.Error, *, was_sent: bool = False) -> StoreError:
        if is_outdated(error):
            return no_tables(self._alias)
        return explained(error, place_of(wrapper), was_sent=was_sent)


class _Rows:
    """Django's connection, for our own statements: rows as they come, whatever the application would like its own to
    be. Its columns have plain types, of which Django converts none.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    @property
    def in_transaction(self) -> bool:
        return self._connection.in_transaction

    def execute(self, sql: str, parameters: Any = ()) -> sqlite3.Cursor:
        cursor = self._connection.cursor()
        cursor.row_factory = None
        return cursor.execute(sql, parameters)

    def undo(self, wrapper: Wrapper) -> None:
        try:
            if self.in_transaction:
                self.execute("ROLLBACK").close()
        except sqlite3.Error:
            close(wrapper)

    def end(self) -> None:
        pass


class _InTurn(_Rows):
    """The same, with a wait for the turn before the write lock."""

    def __init__(self, wrapper: Wrapper, turns: Turns) -> None:
        super().__init__(wrapper.connection)
        self._place = place_of(wrapper)
        self._turns = turns
        self._has_turn = False

    def execute(self, sql: str, parameters: Any = ()) -> sqlite3.Cursor:
        if sql == _BEGIN:
            self._turns.take("that of a command", self._place)
            self._has_turn = True
        return super().execute(sql, parameters)

    def end(self) -> None:
        if self._has_turn:
            self._turns.give_on()


class _Nested(_Rows):
    """The same inside the transaction of a test."""

    def execute(self, sql: str, parameters: Any = ()) -> sqlite3.Cursor:
        return super().execute(_SAVEPOINT.get(sql, sql), parameters)

    def undo(self, wrapper: Wrapper) -> None:  # noqa: ARG002 - the test's own
        with suppress(sqlite3.Error):  # There is no savepoint: a read failed before it.
            self.execute("ROLLBACK TO semel").close()
            self.execute("RELEASE semel").close()


def _origin(error: DjangoError) -> sqlite3.Error:
    origin = error.__cause__
    return origin if isinstance(origin, sqlite3.Error) else sqlite3.OperationalError(str(error))


def place_of(wrapper: Wrapper) -> Place:
    """Return where the file is, for messages."""
    return Place(Path(str(wrapper.settings_dict["NAME"])), Names())
