"""Both entry points on every store. Each is open for the whole session; tests keep apart by tenant."""

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from semel import Policy, stores
from semel.stores.tiered import Tiered
from tests.databases import Databases
from tests.kit import servers
from tests.web.harness import Api, AsgiWorld, WsgiWorld

ENTRIES = ("asgi", "wsgi")
STORES = ("memory", "sqlite", "postgres", "redis", "tiered")


@pytest.fixture(scope="session")
def shared_postgres_url(migrated_databases: Databases) -> Iterator[str]:
    """The URL of one database with the tables in it, for tests that keep to a tenant of their own."""
    with migrated_databases.lend() as url:
        yield url


@pytest.fixture(scope="session", params=[f"{entry}-{store}" for entry in ENTRIES for store in STORES])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsgiWorld | WsgiWorld]:
    """One entry point on one store."""
    entry, store = request.param.split("-")
    where: str | Tiered
    if store == "tiered":
        where = Tiered(store_url(request, "postgres", Path()), cache=store_url(request, "redis", Path()))
    else:
        where = store_url(request, store, tmp_path_factory.mktemp("web"))
    opened: AsgiWorld | WsgiWorld
    opened = AsgiWorld(lambda: stores.async_store(where)) if entry == "asgi" else WsgiWorld(lambda: stores.store(where))
    yield opened
    opened.close()


@pytest.fixture
def api(world: AsgiWorld | WsgiWorld) -> Api:
    """A shop of this test's own, under the usual policy."""
    return Api(world, Policy.ietf())


def store_url(request: pytest.FixtureRequest, store: str, folder: Path) -> str:
    if store == "postgres":
        url: str = request.getfixturevalue("shared_postgres_url")
        return url
    if store == "redis":
        server: servers.RedisServer = request.getfixturevalue("redis_server")
        # Another database than the one that tests of the store itself empty.
        return urlsplit(server.url)._replace(path="/1").geturl()
    return "memory://" if store == "memory" else f"sqlite:///{folder / 'semel.db'}"


@pytest.fixture
def postgres_url(migrated_postgres_url: str) -> str:
    """The URL of a database with Semel's tables in it."""
    return migrated_postgres_url
