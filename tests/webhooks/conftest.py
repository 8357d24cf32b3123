"""The stores that have endpoints."""

import pytest


@pytest.fixture
def postgres_url(migrated_postgres_url: str) -> str:
    """The URL of a database with Semel's tables in it."""
    return migrated_postgres_url


@pytest.fixture(params=["sqlite_url", "postgres_url"])
def url(request: pytest.FixtureRequest) -> str:
    """The URL of a store that has a table of endpoints."""
    found: str = request.getfixturevalue(request.param)
    return found
