"""The databases that messages are received in."""

import pytest

from tests.inbox.consumers import prepare


@pytest.fixture
def postgres_url(migrated_postgres_url: str) -> str:
    """The URL of a database with Semel's tables in it."""
    return migrated_postgres_url


@pytest.fixture
def url(request: pytest.FixtureRequest, kind: str) -> str:
    """The URL of a database for this kind of connection, with parcels in it."""
    found: str = request.getfixturevalue("sqlite_url" if "sqlite" in kind else "postgres_url")
    prepare(found)
    return found
