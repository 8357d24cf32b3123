"""The servers and databases that tests ask for by name. Each test gets an empty one."""

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit
from uuid import uuid4

import psycopg
import pytest

from semel.testing import servers


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[servers.PostgresServer]:
    with servers.postgres() as server:
        yield server


@pytest.fixture
def postgres_url(postgres_server: servers.PostgresServer) -> Iterator[str]:
    """The URL of an empty database."""
    name = f"semel_{uuid4().hex}"
    with psycopg.connect(postgres_server.url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}".encode())
        yield urlsplit(postgres_server.url)._replace(path=f"/{name}").geturl()
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


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
