"""What a database says of the work that it did: entries and pages read, bytes written. It asks for no work itself.

PostgreSQL counts by statement (pg_stat_statements) and by index; a session hands the latter in when it ends. Of SQLite,
which has no server, the kernel tells how many bytes this process read and wrote. Redis tells the time of its commands.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import psycopg
import redis

from semel.stores import store

#: What the bench's own server is started with.
SETTINGS = {
    "shared_preload_libraries": "pg_stat_statements",
    "shared_buffers": "2GB",
    "synchronous_commit": "on",
    "max_wal_size": "8GB",
    "checkpoint_timeout": "1h",
    # So that no vacuum is counted, and dead rows stay where they are.
    "autovacuum": "off",
}

_ENTRIES = """
SELECT coalesce((SELECT sum(idx_tup_read) FROM pg_stat_user_indexes), 0),
       coalesce((SELECT sum(seq_tup_read + coalesce(idx_tup_fetch, 0)) FROM pg_stat_user_tables), 0)
"""
_STATEMENTS = """
SELECT coalesce(sum(calls), 0), coalesce(sum(shared_blks_hit + shared_blks_read), 0), coalesce(sum(wal_bytes), 0),
       coalesce(sum(wal_fpi), 0), coalesce(sum(total_exec_time), 0)
  FROM pg_stat_statements WHERE query LIKE '%semel_%' AND query NOT LIKE '%pg_stat%'
"""
_OTHERS = """
SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()
   AND backend_type = 'client backend' AND coalesce(state, '') <> 'idle in transaction'
"""
_RELATIONS = """
SELECT relname, pg_relation_size(oid)
  FROM pg_class
 WHERE oid = 'semel_keys'::regclass OR oid IN (SELECT indexrelid FROM pg_index WHERE indrelid = 'semel_keys'::regclass)
    OR oid = (SELECT reltoastrelid FROM pg_class WHERE oid = 'semel_keys'::regclass)
 ORDER BY relkind DESC, relname
"""


@dataclass(frozen=True)
class Work:
    """What one operation took, on the average. None: this store can't tell."""

    entries: float | None = None
    rows: float | None = None
    #: Pages of PostgreSQL; of SQLite kilobytes that were read.
    pages: float | None = None
    written: float | None = None
    full_pages: float | None = None
    server_ms: float | None = None


class Counters(Protocol):
    """One store's counters."""

    def opening(self) -> None:
        """Note what was read before, by those who have disconnected."""

    def begin(self) -> None:
        """Count from here on, once all that is not to be counted has been done."""

    def end(self, operations: int, reads: int) -> Work:
        """Say what so many operations took; entries were read by *reads*, those before ``begin`` included."""

    def sizes(self) -> dict[str, int]:
        """Say how many bytes each part of the store has."""


class PostgresCounters:
    """Those of one database on a server of the bench's own."""

    def __init__(self, url: str) -> None:
        """Look at the database at *url*."""
        self._connection = psycopg.connect(url, autocommit=True)
        self._connection.execute("CREATE EXTENSION IF NOT EXISTS pg_stat_statements")
        self._before: tuple[Any, ...] = (0, 0)

    def opening(self) -> None:
        """Note what was read before, by those who have disconnected."""
        self._until_all_have_left()
        self._before = self._ask(_ENTRIES)

    def begin(self) -> None:
        """Count from here on."""
        self._connection.execute("SELECT pg_stat_statements_reset()")

    def end(self, operations: int, reads: int) -> Work:
        """Say what was done by those that have disconnected."""
        self._until_all_have_left()
        entries, rows = (after - before for after, before in zip(self._ask(_ENTRIES), self._before, strict=True))
        _, pages, written, full, milliseconds = (float(each) / operations for each in self._ask(_STATEMENTS))
        return Work(float(entries) / reads, float(rows) / reads, pages, written, full, milliseconds)

    def sizes(self) -> dict[str, int]:
        """Heap, toast and each index."""
        return {str(name): int(size) for name, size in self._connection.execute(_RELATIONS)}

    def _until_all_have_left(self) -> None:
        while self._ask(_OTHERS) != (0,):
            time.sleep(0.01)

    def _ask(self, question: str) -> tuple[Any, ...]:
        [row] = self._connection.execute(question.encode()).fetchall()
        return tuple(row)

    def close(self) -> None:
        """Disconnect."""
        self._connection.close()


class SqliteCounters:
    """Those of this process, which reads and writes the file."""

    def __init__(self, url: str) -> None:
        """Look at the file at *url*."""
        self._path = Path(urlsplit(url).path[1:])
        self._before = (0, 0)

    def opening(self) -> None:
        """Nothing is noted."""

    def begin(self) -> None:
        """Count from here on."""
        self._before = _own_traffic()

    def end(self, operations: int, reads: int) -> Work:  # noqa: ARG002 - nothing is read before
        """Say what the kernel counted."""
        read, written = (after - before for after, before in zip(_own_traffic(), self._before, strict=True))
        return Work(pages=read / operations / 1024, written=written / operations)

    def sizes(self) -> dict[str, int]:
        """The file; it has all in it."""
        keys = store(f"sqlite:///{self._path}")
        keys.close()
        return {"file": self._path.stat().st_size}

    def close(self) -> None:
        """Nothing is open."""


def _own_traffic() -> tuple[int, int]:
    facts = dict(line.split(": ") for line in Path("/proc/self/io").read_text(encoding="ascii").splitlines())
    return int(facts["rchar"]), int(facts["wchar"])


class RedisCounters:
    """Those of a server of the bench's own."""

    def __init__(self, url: str) -> None:
        """Look at the server at *url*."""
        self._client = redis.Redis.from_url(url)

    def opening(self) -> None:
        """Nothing is noted."""

    def begin(self) -> None:
        """Count from here on."""
        self._client.config_resetstat()

    def end(self, operations: int, reads: int) -> Work:  # noqa: ARG002 - nothing is read before
        """Say what the server counted: commands, in the place of rows, with those that scripts call."""
        said = self._client.info("commandstats")
        told = {"cmdstat_config|resetstat", "cmdstat_info"}
        calls = sum(each["calls"] for name, each in said.items() if name not in told)
        spent = sum(said[name]["usec"] for name in ("cmdstat_evalsha", "cmdstat_eval", "cmdstat_scan") if name in said)
        return Work(rows=calls / operations, server_ms=spent / operations / 1000)

    def sizes(self) -> dict[str, int]:
        """Memory, without what an empty server takes."""
        facts = self._client.info("memory")
        return {"memory": int(facts["used_memory"]) - int(facts["used_memory_startup"])}

    def close(self) -> None:
        """Disconnect."""
        self._client.close()


@contextmanager
def vacuum_held_back(url: str) -> Iterator[None]:
    """Keep a transaction open and idle that still sees every row that is deleted inside the block."""
    with psycopg.connect(url) as old:
        old.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        old.execute("SELECT count(*) FROM pg_class")
        yield
