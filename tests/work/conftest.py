"""The stores that the services are proven on."""

from collections.abc import Iterator
from contextlib import closing

import pytest

from semel.stores.base import Store
from tests.work.world import World, memory_world, postgres_world, sqlite_world


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def world(request: pytest.FixtureRequest) -> World:
    """A store in memory, in a file, or on a server."""
    if request.param == "memory":
        return memory_world()
    url = request.getfixturevalue(f"{request.param}_url")
    return sqlite_world(url) if request.param == "sqlite" else postgres_world(url)


@pytest.fixture
def store(world: World) -> Iterator[Store]:
    """One handle on it."""
    with closing(world.open()) as opened:
        yield opened


@pytest.fixture
def postgres_url(migrated_postgres_url: str) -> str:
    """The URL of a database with Semel's tables in it."""
    return migrated_postgres_url
