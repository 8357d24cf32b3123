"""The servers and databases that tests ask for by name. Each test gets an empty one.

Run by several processes (``make test``), each of them has servers of its own, and none of its tests knows of others.
"""

import logging
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import hypothesis
import pytest
import redis

from semel import stores
from semel.stores import endings
from tests.databases import Databases, Prepared
from tests.kit import servers
from tests.kit.shared import shared

#: Whoever needs a server that this machine lacks just asks for it, here or in a test: it is skipped.
pytest_plugins = ["tests.absent", "tests.slow"]

# Tests start hundreds of programs. Each module is compiled once for all of them, whatever the environment says.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# How long an example takes says how busy the machine is, and nothing about Semel.
hypothesis.settings.register_profile("untimed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("untimed")

#: Where Linux keeps files in memory, and how much has to be free there. SQLite waits for the disk at each commit, and
#: no test cuts the power.
MEMORY, MEMORY_BYTES = Path("/dev/shm"), 2**30  # noqa: S108 - pytest makes a folder of its own in it.

#: Of RabbitMQ here, so that a message that is too large is small.
MAX_RABBITMQ_BYTES = 100_000

#: A worker has a PostgreSQL of its own, and a core with nothing to do helps nobody who waits for the last test.
MAX_WORKERS = 8


def pytest_configure() -> None:
    if MEMORY.is_dir() and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > MEMORY_BYTES:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))


def pytest_xdist_auto_num_workers() -> int:
    """What ``-n auto`` is: three processes for two cores, and two where there is one, since tests also wait."""
    if {"SEMEL_TEST_POSTGRES", "SEMEL_TEST_REDIS"} & os.environ.keys():
        return 1  # Some tests look at what the whole server does, and there is one for all.
    cores = os.cpu_count() or 1
    return min(cores + max(1, cores // 2), MAX_WORKERS)


# A thread beside the tests would add what one test has counted while another looks at the log, or at its connections.
endings.COUNT_INTERVAL = timedelta(days=1)


@pytest.fixture(autouse=True)
def plain_logging() -> None:
    """What is logged is what a new process logs, whatever the frameworks of other tests have set up."""
    logging.getLogger().setLevel(logging.WARNING)


@pytest.fixture(autouse=True)
def patient_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Report mode waits for the store, however busy the machine is that the tests run on."""
    monkeypatch.setattr("semel.guard.lookups.PATIENCE_SECONDS", 30.0)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[servers.PostgresServer]:
    """It does not wait for the disk. A test that is about what outlives a crash of the machine has its own."""
    with servers.postgres(fsync=False) as server:
        yield server


@pytest.fixture(scope="session")
def postgres_databases(postgres_server: servers.PostgresServer) -> Iterator[Databases]:
    with Databases(postgres_server.url) as databases:
        yield databases


@pytest.fixture
def empty_postgres_url(postgres_databases: Databases) -> Iterator[str]:
    """The URL of an empty database."""
    with postgres_databases.lend() as url:
        yield url


@pytest.fixture
def postgres_url(empty_postgres_url: str) -> str:
    """The URL of a database. In folders where no test is about how tables are made, Semel's are there already."""
    return empty_postgres_url


def migrate(url: str) -> None:
    store = stores.store(url)
    store.migrate()
    store.close()


@pytest.fixture(scope="session")
def migrated_databases(postgres_server: servers.PostgresServer) -> Iterator[Databases]:
    with Prepared(postgres_server.url, migrate, kept=["semel_keys_migrations"]) as databases:
        yield databases


@pytest.fixture
def migrated_postgres_url(migrated_databases: Databases) -> Iterator[str]:
    """The URL of a database with Semel's tables in it, and nothing in them. To have it is quicker than to make them."""
    with migrated_databases.lend() as url:
        yield url


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """The URL of a file that does not exist yet."""
    return f"sqlite:///{tmp_path / 'semel.db'}"


@pytest.fixture(scope="session")
def pgbouncer_server(postgres_server: servers.PostgresServer) -> Iterator[servers.PgBouncer]:
    """In transaction mode, with two connections to each database."""
    with servers.pgbouncer(postgres_server) as server:
        yield server


@pytest.fixture
def pgbouncer_url(pgbouncer_server: servers.PgBouncer, postgres_url: str) -> str:
    """The URL of the same database as ``postgres_url``, through PgBouncer."""
    return pgbouncer_server.through(postgres_url)


@pytest.fixture(scope="session")
def redis_server() -> Iterator[servers.RedisServer]:
    with servers.redis() as server:
        with redis.Redis.from_url(server.url) as client:
            if client.dbsize():
                pytest.fail(f"The tests empty {server.url}, and there is something in it. Name another database.")
        yield server


@pytest.fixture
def redis_url(redis_server: servers.RedisServer) -> str:
    """The URL of an empty Redis database."""
    with redis.Redis.from_url(redis_server.url) as client:
        client.flushdb()
    return redis_server.url


@pytest.fixture(scope="session")
def rabbitmq_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.RabbitMQServer]:
    """One for all processes, since it takes seconds to start. A test has its own queues in it, and does not stop it."""
    own = tmp_path_factory.getbasetemp()
    with shared(own.parent if "PYTEST_XDIST_WORKER" in os.environ else own, "rabbitmq", _started_rabbitmq) as url:
        yield servers.RabbitMQServer(url)


@contextmanager
def _started_rabbitmq() -> Iterator[str]:
    with servers.rabbitmq(settings={"max_message_size": str(MAX_RABBITMQ_BYTES)}) as server:
        yield server.url


@pytest.fixture(scope="session")
def redis_cluster() -> Iterator[servers.RedisCluster]:
    """Three masters. A test that kills one of them starts it again, and waits ``until_whole``."""
    with servers.redis_cluster() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def redis_sentinel() -> Iterator[servers.RedisSentinel]:
    """A master, two replicas, three sentinels. A test that kills one of them has ``servers.redis_sentinel()`` of its
    own, which is sooner there than this one is whole again.
    """
    with servers.redis_sentinel(down_after=30_000) as watched:
        yield watched
