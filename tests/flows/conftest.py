"""The shops in which processes die."""

from collections.abc import Iterator

import pytest

from tests.flows import shops


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def shop(request: pytest.FixtureRequest) -> Iterator[shops.Shop]:
    """A store, a way to let time pass in it, and books in the same database."""
    if request.param == "memory":
        opened = shops.memory()
    elif request.param == "sqlite":
        opened = shops.sqlite(request.getfixturevalue("sqlite_url"))
    else:
        opened = shops.postgres(request.getfixturevalue("postgres_url"))
    with opened as shop:
        yield shop


@pytest.fixture
def postgres_url(migrated_postgres_url: str) -> str:
    """The URL of a database with Semel's tables in it."""
    return migrated_postgres_url
