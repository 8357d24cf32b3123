"""Django, set up for these tests, and databases with the tables in them. Each test gets a fresh one.

``default`` is the alias. Ask for ``database`` (PostgreSQL and SQLite in turn), or for one of them by name.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.databases import Databases, Prepared
from tests.django import project
from tests.kit import servers

project.set_up()
pytest.register_assert_rewrite("semel.testing.conformance")


#: Tables that are filled when Django migrates.
FILLED = ("auth_permission", "django_content_type", "django_migrations", "semel_keys_migrations")


def migrate(url: str) -> None:
    with project.databases(default=url):
        project.make_tables()


@pytest.fixture(scope="session")
def django_databases(postgres_server: servers.PostgresServer) -> Iterator[Databases]:
    """Databases with all tables."""
    with Prepared(postgres_server.url, migrate, kept=FILLED) as databases:
        yield databases


@pytest.fixture(scope="session")
def migrated_sqlite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with all tables, to copy."""
    path = tmp_path_factory.mktemp("django") / "template.db"
    migrate(f"sqlite:///{path}")
    return path


@pytest.fixture
def django_postgres_url(django_databases: Databases) -> Iterator[str]:
    """The URL of a PostgreSQL database with all tables."""
    with django_databases.lend() as url:
        yield url


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
