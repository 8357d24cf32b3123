"""One store of each kind, in both colours, empty for each test."""

from collections.abc import AsyncIterator, Iterator

import pytest

from semel import functions, stores
from semel.stores import AsyncStore, Store
from semel.stores.memory import AsyncMemoryStore, MemoryStore


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    """Each test ends as a process does: no store is left open, and no thread renews."""
    yield
    functions.close()


KINDS = ("memory", "sqlite", "postgres")


@pytest.fixture(params=["sqlite", "postgres"])
def durable_url(request: pytest.FixtureRequest) -> str:
    """The URL of a store that outlives a process."""
    url: str = request.getfixturevalue(f"{request.param}_url")
    store = stores.store(url)
    store.migrate()
    store.close()
    return url


@pytest.fixture(params=KINDS)
def keys(request: pytest.FixtureRequest) -> Iterator[Store]:
    """A store for threads."""
    url = "memory://" if request.param == "memory" else request.getfixturevalue(f"{request.param}_url")
    store = stores.store(url)
    store.migrate()
    yield store
    store.close()


@pytest.fixture(params=KINDS)
async def async_keys(request: pytest.FixtureRequest) -> AsyncIterator[AsyncStore]:
    """A store for an event loop."""
    if request.param == "memory":
        yield AsyncMemoryStore()
        return
    url = request.getfixturevalue(f"{request.param}_url")
    store = stores.store(url)
    store.migrate()
    store.close()
    async with stores.async_store(url) as keys:
        yield keys


@pytest.fixture
def memory() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def postgres_url(migrated_postgres_url: str) -> str:
    """The URL of a database with Semel's tables in it."""
    return migrated_postgres_url
