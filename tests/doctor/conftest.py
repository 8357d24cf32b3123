"""Stores to be examined."""

import pytest

from tests.conftest import migrate


@pytest.fixture
def postgres_url(migrated_postgres_url: str) -> str:
    """The URL of a database with Semel's tables in it."""
    return migrated_postgres_url


@pytest.fixture
def sqlite_url(sqlite_url: str) -> str:
    """The URL of a file with Semel's tables in it."""
    migrate(sqlite_url)
    return sqlite_url
