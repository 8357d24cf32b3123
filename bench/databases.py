"""The databases behind the servers: a real PostgreSQL with commits that reach the disk, files for SQLite, a real Redis;
and what PostgreSQL says of itself. Which requests reach them is elsewhere.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, assert_never
from urllib.parse import urlsplit

import psycopg

from bench import cpu
from bench.cases import WITH_REDIS, StoreKind
from bench.setup import Place
from semel.stores import store
from tests.kit import servers
from tests.kit.servers.resp import ask_facts

#: Said aloud, so that no server named in the environment is used in place of our own.
DURABLE = {
    "fsync": "on",
    "synchronous_commit": "on",
    "full_page_writes": "on",
    # A checkpoint that one case brought about would be paid for by the next, in whole pages of WAL.
    "max_wal_size": "8GB",
    "checkpoint_timeout": "1h",
    # A vacuum in a round would be counted in it. So each table is as between two vacuums: never analysed, and with all
    # its dead rows.
    "autovacuum": "off",
    # Every case has a server of its own, with a pool of its own.
    "max_connections": "300",
}

#: What is acknowledged reaches the log at once, and the disk within a second: what most people run.
APPENDING = {"appendonly": "yes", "appendfsync": "everysec"}
#: One for each store.
REDIS_DATABASES = 64


class Databases:
    """Makes empty stores, and tells what PostgreSQL has done."""

    def __init__(
        self,
        postgres: servers.PostgresServer,
        folder: Path,
        redis: servers.RedisServer | None,
        connection: psycopg.Connection[Any],
    ) -> None:
        self._postgres = postgres
        self._connection = connection
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
            case "PostgreSQL":
                return Place(self._postgres_url())
            case "SQLite":
                return Place(_migrated(f"sqlite:///{self._folder / self._name()}.db"))
            case never:
                assert_never(never)

    def _postgres_url(self) -> str:
        name = self._name()
        self._connection.execute(f"CREATE DATABASE {name}".encode())
        return _migrated(urlsplit(self._postgres.url)._replace(path=f"/{name}").geturl())

    def _empty_redis(self) -> str:
        if self._redis is None:
            raise AssertionError
        return urlsplit(self._redis.url)._replace(path=f"/{next(self._numbers)}").geturl()

    def _name(self) -> str:
        self._count += 1
        return f"bench_{self._count}"

    @property
    def postgres_url(self) -> str:
        """Where the server is: the database that it begins with, which no case uses."""
        return self._postgres.url

    def processor_time(self) -> cpu.Postgres:
        """What PostgreSQL's processes have spent so far."""
        return cpu.Postgres.of(self._postgres.pid, urlsplit(self._postgres.url).username or "")

    def wal_bytes(self) -> int:
        """How much the server has logged since it was made."""
        return self._number("SELECT (pg_current_wal_insert_lsn() - '0/0'::pg_lsn)::bigint")

    def transactions(self, url: str) -> int:
        """How many transactions the database at *url* has seen, as far as they are reported."""
        return self._number("SELECT xact_commit FROM pg_stat_database WHERE datname = %s", urlsplit(url).path[1:])

    def hot_share(self, url: str) -> float | None:
        """Which part of the updates in the database at *url* was HOT. Its connections report all when they end."""
        with psycopg.connect(url, autocommit=True) as connection:
            asked = connection.execute("SELECT sum(n_tup_upd), sum(n_tup_hot_upd) FROM pg_stat_user_tables")
            [(updates, hot)] = asked.fetchall()
        return float(hot / updates) if updates else None

    def _number(self, question: str, *parameters: str) -> int:
        # Over another database than the one in question: asking must not count.
        [(number,)] = self._connection.execute(question.encode(), parameters).fetchall()
        return int(number)


@contextmanager
def databases(kinds: Collection[StoreKind | None]) -> Iterator[Databases]:
    """Yield the databases for stores of these *kinds*, and remove them afterwards."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="semel-bench-"))
        postgres = stack.enter_context(servers.postgres(settings=DURABLE))
        redis = None
        if WITH_REDIS & frozenset(kinds):
            with suppress(servers.NoServerBinary):
                redis = stack.enter_context(servers.redis(settings={**APPENDING, "databases": str(REDIS_DATABASES)}))
        connection = stack.enter_context(psycopg.connect(postgres.url, autocommit=True))
        yield Databases(postgres, Path(folder), redis, connection)


def _migrated(url: str) -> str:
    made = store(url)
    made.migrate()
    made.close()
    return url
