"""The evidence: the effects table, the provider's log, the histories. Also how a run moves the database's
clock: it makes rows older. Nothing of Semel is imported, and nothing is judged here.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import psycopg

from torture.checker import Charge, Effect, Event

_MAKE = "CREATE TABLE IF NOT EXISTS effects (key text, step text, attempt integer, worker text)"
_READ = "SELECT key, step, attempt, worker FROM effects"
#: Longer than any test holds the file.
_PATIENCE_SECONDS = 20


class Database:
    """The database of a run, looked at from outside."""

    def __init__(self, url: str) -> None:
        """Look at the database of the store at *url*."""
        self.url = url
        self.is_postgres = urlsplit(url).scheme != "sqlite"
        self._connection: psycopg.Connection[Any] | None = None

    def make(self) -> None:
        """Make the effects table. It has no unique key, so that what is done twice shows twice."""
        self.execute(_MAKE)

    def effects(self) -> list[Effect]:
        """Read what was done."""
        return [Effect(*row) for row in self.execute(_READ)]

    def end_leases(self, keys: Sequence[str] | None = None) -> None:
        """Let the leases of *keys*, or all, have run out."""
        self._age("lease_expires_at", keys, "state = 'processing'")

    def end_retention(self, keys: Sequence[str]) -> None:
        """Let *keys* be past their retention."""
        self._age("expires_at", keys, "true")

    def lose(self, key: str) -> None:
        """Lose the record of *key*, as a fail-over does that loses an acknowledged commit."""
        self.execute(f"DELETE FROM semel_keys WHERE key = {self._mark}", (key,))  # noqa: S608 - a literal

    def states(self) -> dict[str, str]:
        """Return the state of every record."""
        return dict(self.execute("SELECT key, state FROM semel_keys"))

    def _age(self, column: str, keys: Sequence[str] | None, where: str) -> None:
        past = "clock_timestamp() - interval '1 second'" if self.is_postgres else "(SELECT now - 1000 FROM {}_clock)"
        change = f"UPDATE semel_keys SET {column} = {past.format('semel_keys')} WHERE {where}"  # noqa: S608 - literals
        if keys is None:
            self.execute(change)
        for key in keys or ():
            self.execute(f"{change} AND key = {self._mark}", (key,))

    @property
    def _mark(self) -> str:
        return "%s" if self.is_postgres else "?"

    def execute(self, sql: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        """Run one statement in a transaction of its own; return its rows."""
        if not self.is_postgres:
            with closing(open_sqlite(self.url)) as file:
                return file.execute(sql, values).fetchall()
        if self._connection is None or self._connection.broken:
            self._connection = psycopg.connect(self.url, autocommit=True)
        try:
            cursor = self._connection.execute(sql.encode(), values)
            return cursor.fetchall() if cursor.description else []
        except psycopg.OperationalError:
            # The server was restarted meanwhile: the next use opens a new connection.
            self.close()
            raise

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
        self._connection = None


def open_sqlite(url: str) -> sqlite3.Connection:
    """Open the file that *url* names, every statement a transaction of its own."""
    path = unquote(urlsplit(url).path.removeprefix("/"))
    return sqlite3.connect(path, timeout=_PATIENCE_SECONDS, isolation_level=None)


def append(path: Path, line: dict[str, Any] | str) -> None:
    """Add one line to a file that several processes write: one write, so that lines stay whole."""
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(handle, json.dumps(line).encode() + b"\n")
    finally:
        os.close(handle)


class History:
    """What clients and workers saw, in the order in which they saw it."""

    def __init__(self, path: Path) -> None:
        """Keep it in the file *path*."""
        self.path = path
        #: What was read already, and how many bytes that were: it grows long, and is looked at often.
        self._events: list[Event] = []
        self._bytes = 0

    def add(self, event: Event) -> None:
        """Write one event down, now."""
        append(self.path, asdict(event))

    def read(self) -> list[Event]:
        """Return all of it."""
        new = _whole_lines(self.path, self._bytes)
        self._events += [Event(**json.loads(line)) for line in new.splitlines()]
        self._bytes += len(new)
        return list(self._events)


def read_charges(path: Path) -> list[Charge]:
    """Return what a provider has logged."""
    logged = [json.loads(line) for line in _whole_lines(path).splitlines()]
    return [Charge(line["idempotency_key"], line["key"], line["is_first"]) for line in logged]


def _whole_lines(path: Path, first: int = 0) -> bytes:
    """Read a file from its byte *first* on."""
    if not path.exists():
        return b""
    with path.open("rb") as file:
        file.seek(first)
        read = file.read()
    # A reader may see half of the last line while others write: what follows the last line end is ignored.
    return read[: read.rfind(b"\n") + 1]
