"""The databases behind the servers: a real PostgreSQL whose commits reach the disk, files for SQLite, a real Redis."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import assert_never
from urllib.parse import urlsplit

import psycopg

from bench.cases import WITH_REDIS, StoreKind
from bench.setup import Place
from semel.stores import store
from semel.testing import servers
from semel.testing.servers.resp import ask_facts

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

#: What is acknowledged reaches the log at once, and the disk within a second: what most people run.
APPENDING = {"appendonly": "yes", "appendfsync": "everysec"}
#: One each for whoever asks.
REDIS_DATABASES = 64

#: A connection reports its statistics with the first statement that comes a second after its last report.
REPORT_SECONDS = 1.1


class Databases:
    """Whoever asks for a store gets an empty one."""

    def __init__(self, postgres: servers.PostgresServer, folder: Path, redis: servers.RedisServer | None) -> None:
        self._postgres = postgres
        self._redis = redis
        self._folder = folder
        self._count = 0
        self._numbers = iter(range(REDIS_DATABASES))
        self.versions = {"PostgreSQL": postgres.version}
        if redis is not None:
            how = ", ".join(" ".join(setting) for setting in APPENDING.items())
            said = ask_facts(redis.port, "INFO", "server")
            self.versions["Redis"] = f"{said['redis_version']} ({how})"

    def has(self, kind: StoreKind | None) -> bool:
        """Whether there can be such a store here."""
        return self._redis is not None or kind not in WITH_REDIS

    def new(self, kind: StoreKind) -> Place:
        """Make an empty store with its schema."""
        match kind:
            case "Redis":
                return Place(self._empty_redis())
            case "tiered":
                return Place(self._postgres_url(), self._empty_redis())
            case "tiered, Redis only":
                return Place(self._postgres_url(), self._empty_redis(), memory=0)
            case "PostgreSQL":
                return Place(self._postgres_url())
            case "SQLite":
                return Place(_migrated(f"sqlite:///{self._folder / self._name()}.db"))
            case never:
                assert_never(never)

    def _postgres_url(self) -> str:
        name = self._name()
        with psycopg.connect(self._postgres.url, autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}".encode())
        return _migrated(urlsplit(self._postgres.url)._replace(path=f"/{name}").geturl())

    def _empty_redis(self) -> str:
        if self._redis is None:
            raise AssertionError
        return urlsplit(self._redis.url)._replace(path=f"/{next(self._numbers)}").geturl()

    def _name(self) -> str:
        self._count += 1
        return f"bench_{self._count}"

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
def databases(kinds: Collection[StoreKind | None]) -> Iterator[Databases]:
    """Lend the databases for stores of these *kinds*, and remove them afterwards."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="semel-bench-"))
        postgres = stack.enter_context(servers.postgres(settings=DURABLE))
        redis = None
        if WITH_REDIS & frozenset(kinds):
            with suppress(servers.NoServerBinary):
                redis = stack.enter_context(servers.redis(settings={**APPENDING, "databases": str(REDIS_DATABASES)}))
        yield Databases(postgres, Path(folder), redis)


def wait_for_reports() -> None:
    """Let so much time go by that the next statement of a connection also reports the earlier ones."""
    time.sleep(REPORT_SECONDS)


def _migrated(url: str) -> str:
    made = store(url)
    made.migrate()
    made.close()
    return url
