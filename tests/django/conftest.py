"""Django, set up for these tests, and databases with the tables in them. Each test gets a fresh one.

``default`` is the alias. Ask for ``database`` (PostgreSQL and SQLite in turn), or for one of them by name.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit
from uuid import uuid4

import psycopg
import pytest

from tests.django import project
from tests.kit import servers

project.set_up()
pytest.register_assert_rewrite("semel.testing.conformance")


@pytest.fixture(scope="session")
def migrated_postgres(postgres_server: servers.PostgresServer) -> Iterator[str]:
    """A database with all tables, to copy: it has no users."""
    name = f"django_{uuid4().hex}"
    url = urlsplit(postgres_server.url)._replace(path=f"/{name}").geturl()
    with psycopg.connect(postgres_server.url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}".encode())
        with project.databases(default=url):
            project.make_tables()
        yield name
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


@pytest.fixture(scope="session")
def migrated_sqlite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with all tables, to copy."""
    path = tmp_path_factory.mktemp("django") / "template.db"
    with project.databases(default=f"sqlite:///{path}"):
        project.make_tables()
    return path


@pytest.fixture
def django_postgres_url(postgres_server: servers.PostgresServer, migrated_postgres: str) -> Iterator[str]:
    """The URL of a PostgreSQL database with all tables."""
    name = f"django_{uuid4().hex}"
    with psycopg.connect(postgres_server.url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} TEMPLATE {migrated_postgres}".encode())
        yield urlsplit(postgres_server.url)._replace(path=f"/{name}").geturl()
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


@pytest.fixture
def django_sqlite_url(tmp_path: Path, migrated_sqlite: Path) -> str:
    """The URL of a SQLite file with all tables."""
    path = tmp_path / "django.db"
    shutil.copy(migrated_sqlite, path)
    return f"sqlite:///{path}"


@pytest.fixture
def postgres(django_postgres_url: str) -> Iterator[str]:
    """``default`` is a PostgreSQL database; its URL."""
    with project.databases(default=django_postgres_url):
        yield django_postgres_url


@pytest.fixture
def sqlite(django_sqlite_url: str) -> Iterator[str]:
    """``default`` is a SQLite file; its URL."""
    with project.databases(default=django_sqlite_url):
        yield django_sqlite_url


@pytest.fixture(params=["postgres", "sqlite"])
def database(request: pytest.FixtureRequest) -> str:
    """``default`` is a PostgreSQL database, and then a SQLite file; its URL."""
    url: str = request.getfixturevalue(request.param)
    return url
