"""The databases behind the servers: a real PostgreSQL whose commits reach the disk, and files for SQLite."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import psycopg

from bench.cases import StoreKind
from semel.stores import store
from semel.testing import servers

#: Said aloud, so that no server named in the environment is used in place of our own.
DURABLE = {
    "fsync": "on",
    "synchronous_commit": "on",
    "full_page_writes": "on",
    # A checkpoint that one case brought about would be paid for by the next.
    "max_wal_size": "4GB",
    # Every case has a server of its own, with a pool of its own.
    "max_connections": "300",
}

#: A connection reports its statistics with the first statement that comes a second after its last report.
REPORT_SECONDS = 1.1


class Databases:
    """Whoever asks for a store gets an empty one."""

    def __init__(self, postgres: servers.PostgresServer, folder: Path) -> None:
        self._postgres = postgres
        self._folder = folder
        self._count = 0
        self.postgres_version = postgres.version

    def new(self, kind: StoreKind) -> str:
        """Make an empty store with its schema, and return its URL."""
        self._count += 1
        name = f"bench_{self._count}"
        if kind == "PostgreSQL":
            with psycopg.connect(self._postgres.url, autocommit=True) as connection:
                connection.execute(f"CREATE DATABASE {name}".encode())
            url = urlsplit(self._postgres.url)._replace(path=f"/{name}").geturl()
        else:
            url = f"sqlite:///{self._folder / name}.db"
        made = store(url)
        made.migrate()
        made.close()
        return url

    def wal_bytes(self) -> int:
        """How much the server has logged since it was made."""
        return self._number("SELECT (pg_current_wal_insert_lsn() - '0/0'::pg_lsn)::bigint")

    def transactions(self, url: str) -> int:
        """How many transactions the database at *url* has seen, as far as they are reported."""
        return self._number("SELECT xact_commit FROM pg_stat_database WHERE datname = %s", urlsplit(url).path[1:])

    def _number(self, question: str, *parameters: str) -> int:
        # Over another database than the one in question: asking must not count.
        with psycopg.connect(self._postgres.url, autocommit=True) as connection:
            [(number,)] = connection.execute(question.encode(), parameters).fetchall()
        return int(number)


@contextmanager
def databases() -> Iterator[Databases]:
    """Lend the databases, and remove them afterwards."""
    with tempfile.TemporaryDirectory(prefix="semel-bench-") as folder, servers.postgres(settings=DURABLE) as postgres:
        yield Databases(postgres, Path(folder))


def wait_for_reports() -> None:
    """Let so much time go by that the next statement of a connection also reports the earlier ones."""
    time.sleep(REPORT_SECONDS)
