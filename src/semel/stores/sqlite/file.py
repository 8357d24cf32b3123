"""The file: where it is, how it is opened, what its errors mean. What is done with it is in ``writer.py``.

A connection must not live through a fork. SQLite would take the parent's locks for the child's, which has none; when
the parent then closes the file, the log goes, and what the child commits afterwards is lost without an error. That was
measured. So a ``Connection`` is closed before a fork, and opened again when it is next asked for.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit
from weakref import WeakSet

from semel.core.trail import AUDITS, FULL
from semel.errors import ConfigurationError, StoreError, StoreNotReady, StoreReadOnly, StoreUnavailable
from semel.stores.sqlite.statements import PACKAGE, Statements
from semel.stores.statement import Names, load_migrations

#: STRICT tables. Whatever else is used is older.
OLDEST_SQLITE = (3, 37, 0)

#: Writers take turns, each for milliseconds. Who waits this long waits for a hanging process, and says so instead.
BUSY_TIMEOUT = timedelta(seconds=5)

#: How often to ask for write-ahead logging while others, who have just made the file too, ask for the same.
_WAL_TRIES = 50

#: Longer than a batch can take, even one that waits for a locked file.
FORK_PATIENCE = timedelta(seconds=10)

#: Statements that stay prepared: all there are, in the sizes that they are used in.
_PREPARED = 256

_HOW = "Write sqlite:///file.db, or sqlite:////folder/file.db with four slashes for an absolute path."

#: The migrations that make the tables.
_KEYS_MADE_BY = "0001_pre_keys"
_AUDIT_MADE_BY = "0002_pre_steps"

_TROUBLES = {
    sqlite3.SQLITE_BUSY: "was kept locked by another process, or by a transaction of this one, "
    f"for {BUSY_TIMEOUT.total_seconds():.0f} s",
    sqlite3.SQLITE_CORRUPT: "is damaged",
    sqlite3.SQLITE_FULL: "can't grow: the disk is full",
    sqlite3.SQLITE_NOTADB: "is not a SQLite database",
}
_OUTDATED = ("no such table", "no such column", "has no column named")
#: The rest of an extended error code only narrows it down.
_PRIMARY = 0xFF
_READ_ONLY = frozenset({sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM})


@dataclass(frozen=True, slots=True)
class Place:
    """Which file, and which table in it."""

    path: Path
    names: Names
    #: How much the audit trail has (``core/trail.py``).
    audit: str = "on"

    @property
    def is_full(self) -> bool:
        """Whether the trail has a line for every change of a record."""
        return self.audit in FULL


def locate(url: str) -> Place:
    """Read a store URL. A relative path is relative to where the process is now, not to where it goes."""
    if sqlite3.sqlite_version_info < OLDEST_SQLITE:
        needed = ".".join(map(str, OLDEST_SQLITE))
        raise ConfigurationError(f"SQLite {needed} or newer is needed; this Python has {sqlite3.sqlite_version}.")
    parts = urlsplit(url, allow_fragments=False)
    file = unquote(parts.path.removeprefix("/"))
    if parts.scheme != "sqlite":
        raise ConfigurationError(f"{url!r} is no SQLite URL. {_HOW}")
    if file == ":memory:" or not (file or parts.netloc):
        raise ConfigurationError(f"{url!r} names no file, and each connection would have its own. Use memory://.")
    if parts.netloc:
        raise ConfigurationError(f"{url!r} names a host, {parts.netloc!r}, where a file is wanted. {_HOW}")
    settings = dict(parse_qsl(parts.query, keep_blank_values=True))
    audit = settings.pop("audit", "on")
    if audit not in AUDITS:
        raise ConfigurationError(f"{url!r} says audit={audit}. It is {', '.join(AUDITS[:-1])} or {AUDITS[-1]}.")
    if unknown := settings.keys() - {"table"}:
        raise ConfigurationError(f"{url!r} has a setting that is not known: {min(unknown)}. There are audit and table.")
    return Place(Path(file).absolute(), Names(**settings), audit)


def connect(path: Path, kind: type[sqlite3.Connection] = sqlite3.Connection) -> sqlite3.Connection:
    """Open the file, or make it; in write-ahead logging and with every commit on the disk before it is reported."""
    if not path.parent.is_dir():
        raise StoreUnavailable(f"There is no folder {path.parent} to keep {path.name} in. Make it, or correct the URL.")
    _make(path)
    # Threads may share it because they are let in one at a time; transactions are begun and ended by name.
    connection = sqlite3.connect(
        path,
        timeout=BUSY_TIMEOUT.total_seconds(),
        isolation_level=None,
        check_same_thread=False,
        factory=kind,
        cached_statements=_PREPARED,
    )
    try:
        _log_ahead(connection, path)
        # NORMAL lost 20 of 20 acknowledged commits in a simulated power cut. In a batch, FULL costs next to nothing.
        connection.execute("PRAGMA synchronous = FULL").close()
    except BaseException:
        connection.close()
        raise
    return connection


def connect_to_read(path: Path) -> sqlite3.Connection:
    """Open the file only to read it, and never to wait for it: an event loop does this."""
    return sqlite3.connect(
        f"{path.as_uri()}?mode=ro", uri=True, timeout=0, isolation_level=None, check_same_thread=False
    )


class Connection:
    """One connection to the file, for one thread at a time, and for one process only."""

    def __init__(self, place: Place) -> None:
        """Nothing is opened yet."""
        self.place = place
        #: Of whoever uses the connection.
        self.lock = threading.Lock()
        self.opened: sqlite3.Connection | None = None
        self.opened_by = 0
        self._is_forking = False
        _connections.add(self)

    def close(self) -> None:
        """Close it, once what uses it is through."""
        with self.lock:
            self.close_now()

    def keep(self, opened: sqlite3.Connection) -> None:
        """Keep what was opened by this process."""
        self.opened, self.opened_by = opened, os.getpid()

    def close_now(self) -> None:
        """Close it; the caller has the lock."""
        # Another process's is left as it is: closing it would undo what that process is doing.
        if self.opened is not None and self.opened_by == os.getpid():
            self.opened.close()
            self.opened = None

    def before_fork(self) -> None:
        """Close it, and let no thread open it until the fork is over."""
        if self.lock.acquire(timeout=FORK_PATIENCE.total_seconds()):
            self._is_forking = True
            self.close_now()

    def after_fork_in_parent(self) -> None:
        """Go on."""
        if self._is_forking:
            self._is_forking = False
            self.lock.release()

    def after_fork_in_child(self) -> None:
        """Go on; another thread that held the lock is not in this process."""
        self._is_forking = False
        self.lock = threading.Lock()


def has_table(place: Place) -> bool:
    """Look whether the file holds Semel's table, without making one in what may be somebody else's database."""
    connection = sqlite3.connect(f"{place.path.as_uri()}?mode=ro", uri=True)
    try:
        found = connection.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (f"{place.names.table}_migrations",))
        return bool(found.fetchall())
    except sqlite3.Error as error:
        raise explained(error, place.path) from error
    finally:
        connection.close()


def has_neighbours(place: Place) -> bool:
    """Look whether the file holds tables of others."""
    connection = sqlite3.connect(f"{place.path.as_uri()}?mode=ro", uri=True)
    try:
        rows = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
    finally:
        connection.close()
    return any(name not in place.names.tables and not name.startswith("sqlite_") for (name,) in rows)


def migrate(connection: sqlite3.Connection, place: Place, statements: Statements) -> list[str]:
    """Bring the schema up to date under the write lock, so that of several processes one does; return what was done."""
    connection.execute("BEGIN IMMEDIATE").close()
    try:
        applied = _applied(connection, place, statements)
        missing = [each for each in load_migrations(PACKAGE, place.names) if each[0] not in applied]
        for name, script in missing:
            for statement in _statements(script):
                connection.execute(statement).close()
            connection.execute(statements.apply, (name,)).close()
        connection.execute(statements.write_nothing).close()
        connection.execute("COMMIT").close()
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK").close()
        raise
    return [name for name, _ in missing]


def is_migrated(connection: sqlite3.Connection, place: Place, statements: Statements) -> bool:
    """Look whether the schema is up to date, without the write lock, for which one may have to wait."""
    applied = _applied(connection, place, statements)
    return all(name in applied for name, _ in load_migrations(PACKAGE, place.names))


def explained(error: sqlite3.Error, path: Path, *, was_sent: bool = False) -> StoreError:
    """Say in words what SQLite says in a code."""
    code = getattr(error, "sqlite_errorcode", 0) & _PRIMARY
    is_shut = code == sqlite3.SQLITE_CANTOPEN and not os.access(path.parent, os.W_OK)
    if code in _READ_ONLY or is_shut:
        return StoreReadOnly(f"{path} can't be written: it or its folder is read-only for this user ({error}).")
    if is_outdated(error):
        # What opens the file brings it up to date, so somebody has put an older one in its place since.
        return StoreNotReady(f"{path} has no tables of Semel's, or old ones. Run: semel migrate sqlite:///{path}")
    return StoreUnavailable(f"{path} {_TROUBLES.get(code, 'can’t be used')} ({error}).", was_sent=was_sent)


def is_outdated(error: sqlite3.Error) -> bool:
    """Whether a table is missing, or is one of an older release. SQLite has no code of its own for that."""
    return any(words in str(error) for words in _OUTDATED)


def is_busy(error: sqlite3.Error) -> bool:
    """Whether somebody else has the file locked, and nothing is wrong with it."""
    return getattr(error, "sqlite_errorcode", 0) & _PRIMARY == sqlite3.SQLITE_BUSY


def _make(path: Path) -> None:
    """Make the file, if there is none, for this user alone: it holds answers and requests. Its log is made likewise,
    since SQLite does as the file does. One that is there is left as it is.
    """
    with suppress(OSError):  # it is there; or SQLite says why it can't be
        # Where a link leads to, SQLite makes the file: to make one in the link's own place, the system refuses.
        os.close(os.open(path.resolve(), os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))


def _log_ahead(connection: sqlite3.Connection, path: Path) -> None:
    for tries_left in reversed(range(_WAL_TRIES)):
        try:
            ((mode,),) = connection.execute("PRAGMA journal_mode = WAL").fetchall()
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & _PRIMARY != sqlite3.SQLITE_BUSY or not tries_left:
                raise
            # The one statement that SQLite does not wait with, lest two wait for each other. To begin is to wait.
            connection.execute("BEGIN IMMEDIATE").close()
            connection.execute("ROLLBACK").close()
        else:
            if mode != "wal":
                raise StoreUnavailable(f"{path} can't be shared: its folder allows no write-ahead log, but {mode}.")
            return


def _applied(connection: sqlite3.Connection, place: Place, statements: Statements) -> set[str]:
    table = place.names.table
    objects = {name for (name,) in connection.execute("SELECT name FROM sqlite_master").fetchall()}
    applied: set[str] = set()
    if f"{table}_migrations" in objects:
        applied = {name for (name,) in connection.execute(statements.applied).fetchall()}
    for name, maker in ((table, _KEYS_MADE_BY), (place.names.audit, _AUDIT_MADE_BY)):
        if name in objects and maker not in applied:
            raise StoreNotReady(
                f"{place.path} has a table {name} that is not Semel's. Add ?table=another_name to the URL."
            )
    return applied


def _statements(script: str) -> Iterator[str]:
    # Not executescript(), which commits first.
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""


_connections: WeakSet[Connection] = WeakSet()


def _tell(step: Callable[[Connection], None]) -> Callable[[], None]:
    def tell_all() -> None:
        for connection in tuple(_connections):
            step(connection)

    return tell_all


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(
        before=_tell(Connection.before_fork),
        after_in_parent=_tell(Connection.after_fork_in_parent),
        after_in_child=_tell(Connection.after_fork_in_child),
    )
