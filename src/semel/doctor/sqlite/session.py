"""A SQLite file, opened for reading only; and the folder and the disk that it is on. What is seen, the checks judge."""

from __future__ import annotations

import shlex
import shutil
import sqlite3
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, Self

from semel.doctor.model import Kind
from semel.doctor.session import Handled, Session, Some, Unavailable
from semel.doctor.sqlite.facts import Files, Owned, mounted_on
from semel.stores.sqlite.file import Place, connect_to_read, explained, is_outdated, locate, names_of

#: More of them are not counted.
MAX_COUNTED = 1000
#: How many of the newest records tell how long handlers take.
NEWEST = 1000
#: How many steps of SQLite's machine pass between two looks at the clock.
_STEPS = 10_000

Rows = list[tuple[Any, ...]]


class SQLite(Session):
    """A SQLite file."""

    kind: ClassVar = Kind.SQLITE

    def __init__(self, place: Place, seconds: float, engine: Any = None) -> None:
        """Open it on first use. *engine* makes the application's own connections, if it was given one."""
        self.place = place
        self.where = str(place)
        self.engine = engine
        self._seconds = seconds
        self._opened: sqlite3.Connection | None = None
        self._ends_at = 0.0

    @classmethod
    def at(cls, url: str, seconds: float) -> Self:
        """Use the file at *url*."""
        return cls(locate(url), seconds)

    @classmethod
    def of(cls, store: Any, seconds: float) -> Self:
        """Use the file of *store*."""
        # Where it was given none, it has connections of its own, without an engine.
        return cls(store.place, seconds, getattr(store._connections, "_engine", None))  # noqa: SLF001 - not told otherwise

    @property
    def path(self) -> Path:
        """The file."""
        return self.place.path

    @property
    def words(self) -> dict[str, str]:
        """What stands in commands for the file, and for its folder."""
        return super().words | {"FILE": shlex.quote(str(self.path)), "FOLDER": shlex.quote(str(self.path.parent))}

    def close(self) -> None:
        """Close the file."""
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def abandon(self) -> None:
        """Leave the connection to the thread that uses it."""
        self._opened = None

    def rows(self, sql: str, parameters: Sequence[Any] = ()) -> Rows:
        """Return what *sql* returns, with Semel's own table names put in."""
        self._ends_at = time.monotonic() + self._seconds
        if self._opened is None:
            # SQLite would make the file in some modes, and this must make none.
            if not self.path.is_file():
                raise Unavailable(f"There is no file {self.path}.")
            self._opened = self._connected()
            self._opened.execute(f"PRAGMA busy_timeout = {int(self._seconds * 1000)}")
            self._opened.set_progress_handler(self._is_late, _STEPS)
        try:
            return self._opened.execute(self.place.names.put_into(sql), parameters).fetchall()
        except sqlite3.OperationalError as error:
            if "interrupted" in str(error):
                raise Unavailable(f"It takes longer than {self._seconds:g} s.") from error
            if is_outdated(error):
                raise Unavailable(f"A table of Semel's is missing or old: {error}.") from error
            raise

    def _connected(self) -> sqlite3.Connection:
        """Open the file. Where it has no log, no process uses it, and it is read as it is: else SQLite would make a
        log, which belongs to this user then, and which the server might not be able to write.
        """
        if self.log.exists():
            return connect_to_read(self.path)
        return sqlite3.connect(
            f"{self.path.as_uri()}?mode=ro&immutable=1", uri=True, isolation_level=None, check_same_thread=False
        )

    @property
    def log(self) -> Path:
        """The write-ahead log beside the file."""
        return self.path.with_name(f"{self.path.name}-wal")

    @property
    def journal(self) -> str:
        """The journal that the file itself asks for, by its header."""
        with self.path.open("rb") as file:
            header = file.read(20)
        return "wal" if header[18:20] == b"\x02\x02" else "delete"

    def trouble(self) -> str | None:
        """Why the file can't be read as a database; None: it can."""
        if not self.path.exists():
            return f"There is no file {self.path}. A path from the root has four slashes: sqlite:////folder/file."
        try:
            self.rows("SELECT count(*) FROM sqlite_master")
        except sqlite3.Error as error:
            return str(explained(error, self.place))
        except Unavailable as reason:
            return str(reason)
        return None

    def files(self) -> Files:
        """The file, its folder, its log and its disk."""
        mounts = Path("/proc/mounts")
        path = self.path.resolve()
        links, is_mounted = names_of(path)
        return Files(
            file=Owned.of(path),
            folder=Owned.of(path.parent),
            file_system=mounted_on(path, mounts.read_text()) if mounts.exists() else None,
            free=shutil.disk_usage(path.parent).free,
            size=path.stat().st_size,
            log_size=self.log.stat().st_size if self.log.exists() else 0,
            links=links,
            is_mounted=is_mounted,
        )

    def has_neighbours(self) -> bool:
        """Whether the file has other tables than Semel's."""
        rows = self.rows("SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'")
        return any(name not in self.place.names.tables for (name,) in rows)

    def parked(self) -> Some:
        """Records that wait for a person."""
        return self._some("created_at", "semel_keys", "status IS NULL AND state = 'unknown'")

    def stuck(self) -> Some:
        """Records under a lease that is over."""
        return self._some(
            "lease_expires_at", "semel_keys", "status IS NULL AND state = 'processing' AND lease_expires_at < now"
        )

    def pending(self) -> Some:
        """Records that were accepted and not begun."""
        return self._some("created_at", "semel_keys", "status IS NULL AND state = 'pending' AND expires_at > now")

    def expired(self) -> Some:
        """Records past their retention."""
        return self._some(
            "expires_at",
            "semel_keys",
            "after_retention <> 'keep' AND expires_at <= now AND state <> 'unknown'"
            " AND (state <> 'processing' OR lease_expires_at <= now)",
        )

    def waiting_messages(self) -> Some:
        """Messages that are ready, or due again, and that no relay has."""
        return self._some(
            "coalesce(due_at, created_at)",
            "semel_outbox",
            "(state = 'ready' OR (state = 'waiting' AND due_at <= now))"
            " AND (lease_until IS NULL OR lease_until <= now)",
        )

    def dead_letters(self) -> Some:
        """Messages that no relay tries any more."""
        return self._some("coalesce(ended_at, created_at)", "semel_outbox", "state = 'dead'")

    def parked_messages(self) -> Some:
        """Messages that a consumer has given up."""
        return self._some("changed_at", "semel_inbox", "state <> 'done' AND state = 'parked'")

    def closed_endpoints(self) -> list[tuple[str, str]]:
        """Endpoints that are off."""
        rows = self.rows("SELECT name, coalesce(reason, '') FROM semel_webhooks WHERE state = 'off' LIMIT 20")
        return [(name, reason) for name, reason in rows]

    def handled(self) -> Handled:
        """What the newest finished records tell. One without headers and request line was erased;
        one of atomic mode is made when its handler has run, and has one time.
        """
        rows = self.rows(
            "SELECT CASE WHEN attempt = 1 AND NOT accepted THEN nullif(completed_at - created_at, 0) END, request_line,"
            " body IS NULL AND NOT (headers = '[]' AND request_line IS NULL)"
            " FROM semel_keys WHERE status IS NOT NULL ORDER BY rowid DESC LIMIT ?",
            (NEWEST,),
        )
        timed = [(timedelta(milliseconds=took), line) for took, line, _ in rows if took is not None]
        took, line = max(timed, key=lambda each: each[0], default=(None, None))
        return Handled(len(rows), took, line, sum(bool(is_unkept) for *_, is_unkept in rows))

    def last_upkeep(self) -> timedelta | None:
        """Not known: the services leave no mark in the file."""
        raise Unavailable("A SQLite file does not show whether a service is at work.")

    def _some(self, at: str, table: str, condition: str) -> Some:
        [(count, age)] = self.rows(
            f"SELECT count(*), max(age) FROM (SELECT now - {at} AS age FROM {table}, semel_keys_clock"  # noqa: S608 - made above
            f" WHERE {condition} LIMIT {MAX_COUNTED + 1})"
        )
        length = None if age is None else timedelta(milliseconds=age)
        return Some(min(count, MAX_COUNTED), length, is_more=count > MAX_COUNTED)

    def _is_late(self) -> bool:
        return time.monotonic() > self._ends_at
