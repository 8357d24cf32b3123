"""The file: where it is, how it is opened, what its errors mean. The statements on it are in ``writer.py``.

A connection must not be open during a fork. SQLite would count the parent's locks as the child's, which has none; when
the parent then closes the file, its log is deleted, and what the child commits afterwards is lost without an error.
That was measured. So a ``Connection`` is closed before a fork, and opened again at its next use.
"""

from __future__ import annotations

import os
import re
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from shlex import quote
from urllib.parse import parse_qsl, unquote, urlsplit
from urllib.parse import quote as quote_path

from semel.core.trail import AUDITS, FULL
from semel.errors import ConfigurationError, StoreError, StoreNotReady, StoreReadOnly, StoreUnavailable
from semel.stores.dialect import SQLITE, Dialect
from semel.stores.forks import close_for_forks
from semel.stores.migration import Book, PlannedMigration, PlannedStatement, Work, lacking
from semel.stores.sqlite.statements import PACKAGE, Statements
from semel.stores.statement import DEFAULT_TABLE, Names, load_migrations

#: For STRICT tables. All other features that are used are older.
OLDEST_SQLITE = (3, 37, 0)

#: Writers take turns, each for milliseconds. After this long, a process hangs, and an error is raised.
BUSY_TIMEOUT = timedelta(seconds=5)

#: How often to try to switch on write-ahead logging while other processes, which have just made the file, try the same.
_WAL_TRIES = 50

#: Longer than a batch can take, even one that waits for a locked file.
FORK_PATIENCE = timedelta(seconds=10)

#: Statements that stay prepared: all of them, in all their sizes.
_PREPARED = 256

_HOW = "Write sqlite:///file.db, or sqlite:////folder/file.db with four slashes for an absolute path."

#: The migrations that make the tables.
_KEYS_MADE_BY = "0001_pre_keys"
_AUDIT_MADE_BY = "0002_pre_steps"
_MESSAGES_MADE_BY = "0005_pre_messages"
_COUNTS_MADE_BY = "0007_pre_counts"

_TROUBLES = {
    sqlite3.SQLITE_BUSY: "was kept locked by another process, or by a transaction of this one, "
    f"for {BUSY_TIMEOUT.total_seconds():.0f} s",
    sqlite3.SQLITE_CORRUPT: "is damaged",
    sqlite3.SQLITE_FULL: "can't grow: the disk is full",
    sqlite3.SQLITE_NOTADB: "is not a SQLite database",
}
#: Less may fit.
_NO_SPACE = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_TOOBIG})
#: A migration is one transaction, and readers see the file as it was before.
_MEANWHILE = "what writes to the file, until the migration is committed; replays go on"
#: What the beginning of a statement says about the rows that are there.
_WORK: dict[str, Work] = {
    r"CREATE TABLE \w+ AS SELECT|INSERT INTO .*SELECT": "rewrites",
    r"CREATE (UNIQUE )?INDEX|UPDATE|DELETE": "reads",
}
#: What this process sees mounted, as the kernel writes it: the fifth word of each line is where.
_MOUNTS = Path("/proc/self/mountinfo")
_POINT = 4
_ESCAPES = str.maketrans({letter: f"\\{ord(letter):03o}" for letter in " \t\n\\"})
_OUTDATED = ("no such table", "no such column", "has no column named")
#: The other bits of an extended error code are only details.
_PRIMARY = 0xFF
_READ_ONLY = frozenset({sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM})


@dataclass(frozen=True, slots=True)
class Place:
    """Which file, and which table in it."""

    path: Path
    names: Names
    #: How much the audit trail has (``core/trail.py``).
    audit: str = "on"

    def __str__(self) -> str:
        """Return the URL."""
        table = "" if self.names.table == DEFAULT_TABLE else f"?table={self.names.table}"
        return f"sqlite:///{quote_path(str(self.path))}{table}"

    @property
    def dialect(self) -> Dialect:
        """SQLite, with these tables."""
        return Dialect(SQLITE, self.names, has_trail=self.audit != "off", where=str(self.path))

    @property
    def is_full(self) -> bool:
        """Whether the trail has a line for every change of a record."""
        return self.audit in FULL


def locate(url: str) -> Place:
    """Read a store URL. A relative path is relative to the current folder at this moment, not at later ones."""
    if sqlite3.sqlite_version_info < OLDEST_SQLITE:
        needed = ".".join(map(str, OLDEST_SQLITE))
        raise ConfigurationError(f"SQLite {needed} or newer is needed; this Python has {sqlite3.sqlite_version}.")
    parts = urlsplit(url, allow_fragments=False)
    file = unquote(parts.path.removeprefix("/"))
    if parts.scheme != "sqlite":
        raise ConfigurationError(f"{url!r} is not a SQLite URL. {_HOW}")
    if file == ":memory:" or not (file or parts.netloc):
        raise ConfigurationError(f"{url!r} names no file, and each connection would have its own. Use memory://.")
    if parts.netloc:
        raise ConfigurationError(f"{url!r} names a host, {parts.netloc!r}, and not a file. {_HOW}")
    settings = dict(parse_qsl(parts.query, keep_blank_values=True))
    audit = settings.pop("audit", "on")
    if audit not in AUDITS:
        raise ConfigurationError(f"{url!r} says audit={audit}. It is {', '.join(AUDITS[:-1])} or {AUDITS[-1]}.")
    if unknown := settings.keys() - {"table"}:
        raise ConfigurationError(f"{url!r} has a setting that is not known: {min(unknown)}. There are audit and table.")
    # One name for one file, whichever links lead there: SQLite's log lies beside the file itself.
    return Place(Path(os.path.realpath(file)), Names(**settings), audit)


def connect(path: Path, kind: type[sqlite3.Connection] = sqlite3.Connection) -> sqlite3.Connection:
    """Open or make the file, with write-ahead logging and with every commit on the disk before it is reported."""
    if not path.parent.is_dir():
        raise StoreUnavailable(f"There is no folder {path.parent} to keep {path.name} in. Make it, or correct the URL.")
    _make(path)
    check_name(path)
    # Threads may share it because they use it one at a time; transactions are begun and ended explicitly.
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


def check_name(path: Path) -> None:
    """Raise where the file is known by more than one name. Under each, SQLite keeps another log beside it: a key that
    was claimed under one is free under the other, and what is in a log can be lost.
    """
    real = Path(os.path.realpath(path))
    links, is_mounted = names_of(real)
    if links > 1:
        raise StoreNotReady(
            f"{real} has {links} names (hard links), and processes that open it by another one see another database. "
            f"Keep one of them: find FOLDER -samefile {quote(str(real))}. To copy it: sqlite3 {quote(str(real))} "
            "'.backup COPY'."
        )
    if is_mounted:
        raise StoreNotReady(
            f"{real} is mounted as a single file, so its log is not beside the file that others open, and is lost with "
            f"this container. Mount the folder that it is in: -v /folder/on/the/host:{quote(str(real.parent))}."
        )


def names_of(path: Path) -> tuple[int, bool]:
    """Return how many hard links there are of a file, 0 where there is none, and whether it is a mount by itself."""
    mounted = str(path).translate(_ESCAPES)
    try:
        mounts = _MOUNTS.read_text("utf-8", "surrogateescape")
    except OSError:  # not on Linux
        mounts = ""
    is_mounted = any(mounted in line.split(" ", _POINT + 1)[_POINT : _POINT + 1] for line in mounts.splitlines())
    return (path.stat().st_nlink if path.is_file() else 0), is_mounted


def connect_to_read(path: Path) -> sqlite3.Connection:
    """Open the file only to read it, without waiting for locks: an event loop does this."""
    return sqlite3.connect(
        f"{path.as_uri()}?mode=ro", uri=True, timeout=0, isolation_level=None, check_same_thread=False
    )


class Connection:
    """One connection to the file, for one thread at a time, and for one process only."""

    def __init__(self, place: Place) -> None:
        """Nothing is opened yet."""
        self.place = place
        #: Held while the connection is used.
        self.lock = threading.Lock()
        self.opened: sqlite3.Connection | None = None
        self.opened_by = 0
        self._is_forking = False
        close_for_forks(self)

    def close(self) -> None:
        """Close it, after its current use."""
        with self.lock:
            self.close_now()

    def keep(self, opened: sqlite3.Connection) -> None:
        """Keep what was opened by this process."""
        self.opened, self.opened_by = opened, os.getpid()

    def close_now(self) -> None:
        """Close it; the caller has the lock."""
        # A connection of another process stays open: closing it would undo what that process does.
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
    """Whether the file has Semel's table. It makes none, since the file may be another program's database."""
    with _reading(place) as connection:
        found = connection.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (f"{place.names.table}_migrations",))
        return bool(found.fetchall())


def has_neighbours(place: Place) -> bool:
    """Whether the file has other tables than Semel's."""
    with _reading(place) as connection:
        rows = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
    return any(name not in place.names.tables and not name.startswith("sqlite_") for (name,) in rows)


@contextmanager
def _reading(place: Place) -> Iterator[sqlite3.Connection]:
    """Look into the file as it is, without making one."""
    try:
        with closing(sqlite3.connect(f"{place.path.as_uri()}?mode=ro", uri=True)) as connection:
            yield connection
    except sqlite3.Error as error:
        raise explained(error, place) from error


def plan(place: Place, *, with_post: bool) -> tuple[PlannedMigration, ...]:
    """Return what ``migrate`` would do; the file is not made where there is none."""
    book = Book()
    if place.path.exists() and has_table(place):
        connection = connect_to_read(place.path)
        try:
            book = Book.of(name for (name,) in connection.execute(f"SELECT name FROM {place.names.table}_migrations"))  # noqa: S608 - see Names
        finally:
            connection.close()
    blocks = "nothing: the file is new" if book.is_new else _MEANWHILE
    missing = book.pending(load_migrations(PACKAGE, place.names), with_post=with_post)
    return tuple(PlannedMigration(name, 0, tuple(_planned(script, blocks))) for name, script in missing)


def migrate(
    connection: sqlite3.Connection, place: Place, statements: Statements, *, with_post: bool = False
) -> list[str]:
    """Bring the schema up to date under the write lock, so that only one process does; return what was done."""
    connection.execute("BEGIN IMMEDIATE").close()
    try:
        migrations = load_migrations(PACKAGE, place.names)
        applied = _applied(connection, place, statements)
        lacking(applied, [name for name, _ in migrations], str(place.path))
        missing = list(Book.of(applied).pending(migrations, with_post=with_post))
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
    """Whether the schema is up to date. It takes no write lock, for which it might have to wait."""
    applied = _applied(connection, place, statements)
    return not lacking(applied, [name for name, _ in load_migrations(PACKAGE, place.names)], str(place.path))


def explained(error: sqlite3.Error, place: Place, *, was_sent: bool = False) -> StoreError:
    """Return the ``StoreError`` for a SQLite error code."""
    path = place.path
    code = getattr(error, "sqlite_errorcode", 0) & _PRIMARY
    is_shut = code == sqlite3.SQLITE_CANTOPEN and not os.access(path.parent, os.W_OK)
    if code in _READ_ONLY or is_shut:
        return StoreReadOnly(f"{path} can't be written: it or its folder is read-only for this user ({error}).")
    if is_outdated(error):
        # Opening the file brings it up to date, so it was replaced by an older one since.
        return StoreNotReady(f"{path} has no tables of Semel, or old ones. Run: semel migrate {quote(str(place))}")
    told = StoreUnavailable(f"{path} {_TROUBLES.get(code, 'can’t be used')} ({error}).", was_sent=was_sent)
    told.has_no_space = code in _NO_SPACE
    return told


def is_outdated(error: sqlite3.Error) -> bool:
    """Whether a table is missing, or is from an older release. SQLite has no separate code for that."""
    return any(words in str(error) for words in _OUTDATED)


def is_busy(error: sqlite3.Error) -> bool:
    """Whether another process has locked the file, and nothing is wrong with it."""
    return getattr(error, "sqlite_errorcode", 0) & _PRIMARY == sqlite3.SQLITE_BUSY


def _make(path: Path) -> None:
    """Make the file, if there is none, for this user alone: it holds answers and requests. SQLite makes its log with
    the same permissions. An existing file is not changed.
    """
    with suppress(OSError):  # it is there; or SQLite will report why it can't be made
        # For a symbolic link SQLite makes the target: the system refuses to make a file in the link's own place.
        os.close(os.open(path.resolve(), os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))


def _log_ahead(connection: sqlite3.Connection, path: Path) -> None:
    for tries_left in reversed(range(_WAL_TRIES)):
        try:
            ((mode,),) = connection.execute("PRAGMA journal_mode = WAL").fetchall()
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & _PRIMARY != sqlite3.SQLITE_BUSY or not tries_left:
                raise
            # SQLite does not wait in this one statement, to avoid a deadlock. BEGIN IMMEDIATE does wait.
            connection.execute("BEGIN IMMEDIATE").close()
            connection.execute("ROLLBACK").close()
        else:
            if mode != "wal":
                raise StoreUnavailable(f"{path} can't be shared: its folder allows {mode}, and no write-ahead log.")
            return


def _applied(connection: sqlite3.Connection, place: Place, statements: Statements) -> set[str]:
    table = place.names.table
    objects = {name for (name,) in connection.execute("SELECT name FROM sqlite_master").fetchall()}
    applied: set[str] = set()
    if f"{table}_migrations" in objects:
        applied = {name for (name,) in connection.execute(statements.applied).fetchall()}
    makers = {table: _KEYS_MADE_BY, place.names.audit: _AUDIT_MADE_BY}
    makers[place.names.counts] = _COUNTS_MADE_BY
    makers |= dict.fromkeys((place.names.outbox, place.names.inbox, place.names.webhooks), _MESSAGES_MADE_BY)
    for name, maker in makers.items():
        if name in objects and maker not in applied:
            raise StoreNotReady(
                f"{place.path} has a table {name} that is not Semel's. Add ?table=another_name to the URL."
            )
    return applied


def _planned(script: str, blocks: str) -> Iterator[PlannedStatement]:
    for text in _statements(script):
        lines = (line.partition("--")[0].rstrip() for line in text.splitlines())
        sql = "\n".join(line for line in lines if line).rstrip(";")
        work: Work = next((work for pattern, work in _WORK.items() if re.match(pattern, sql, re.DOTALL)), "nothing")
        yield PlannedStatement(sql, "the whole file", "write lock", work, blocks)


def _statements(script: str) -> Iterator[str]:
    # Not executescript(), which commits first.
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""
