"""The servers and databases that tests ask for by name. Each test gets an empty one.

Run by several processes (``make test``), each of them has servers of its own, and none of its tests knows of others.
"""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from semel.testing import servers
from tests.databases import Databases

#: A worker has a PostgreSQL of its own, and a core with nothing to do helps nobody who waits for the last test.
MOST_WORKERS = 8


def pytest_xdist_auto_num_workers() -> int:
    """What ``-n auto`` is: one process for each core, and two where there is one, since tests also wait."""
    if "SEMEL_TEST_POSTGRES" in os.environ:
        return 1  # Some tests look at what the whole server does, and there is one for all.
    return min(max(2, os.cpu_count() or 1), MOST_WORKERS)


@pytest.fixture(autouse=True)
def plain_logging() -> None:
    """What is logged is what a new process logs, whatever the frameworks of other tests have set up."""
    logging.getLogger().setLevel(logging.WARNING)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[servers.PostgresServer]:
    with servers.postgres() as server:
        yield server


@pytest.fixture(scope="session")
def postgres_databases(postgres_server: servers.PostgresServer) -> Iterator[Databases]:
    with Databases(postgres_server.url) as databases:
        yield databases


@pytest.fixture
def postgres_url(postgres_databases: Databases) -> Iterator[str]:
    """The URL of an empty database."""
    with postgres_databases.lend() as url:
        yield url


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """The URL of a file that does not exist yet."""
    return f"sqlite:///{tmp_path / 'semel.db'}"


@pytest.fixture(scope="session")
def redis_server() -> Iterator[servers.RedisServer]:
    try:
        with servers.redis() as server:
            yield server
    except servers.NoServerBinary as missing:
        pytest.skip(str(missing))  # From Python 3.13 on, no wheel carries a Redis.
