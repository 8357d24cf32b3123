"""``ping`` of a store, for an app's readiness check: it raises exactly when no request could be guarded."""

from __future__ import annotations

import asyncio
import os
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import pytest
import redis

from semel.core.commands import Claim
from semel.core.record import Hold
from semel.errors import StoreError, StoreNotReady, StoreUnavailable
from semel.stores import async_store, store
from semel.stores.tiered import Tiered
from tests.kit import servers
from tests.stores.colours import COLOURS

NOWHERE = "127.0.0.1:9"  # port 9 is "discard", and nobody listens there


def ping(colour: str, given: object) -> None:
    """Ping a store twice, as a process does that is asked again."""
    if colour == "sync":
        with closing(store(given)) as plain:
            plain.ping()
            plain.ping()
        return

    async def twice() -> None:
        async with async_store(given) as coloured:
            await coloured.ping()
            await coloured.ping()

    asyncio.run(twice())


@pytest.mark.parametrize("colour", COLOURS)
@pytest.mark.parametrize("kind", ["memory", "sqlite", "postgres", "redis", "tiered"])
def test_store_that_serves(request: pytest.FixtureRequest, colour: str, kind: str) -> None:
    """It raises nothing where requests can be guarded; a cache in front that is away is no reason to refuse them."""
    if kind == "memory":
        given: object = "memory://"
    elif kind == "tiered":
        given = Tiered(durable=request.getfixturevalue("sqlite_url"), cache=f"redis://{NOWHERE}")
    else:
        given = request.getfixturevalue({"postgres": "migrated_postgres_url"}.get(kind, f"{kind}_url"))
    ping(colour, given)


@pytest.mark.parametrize("colour", COLOURS)
@pytest.mark.parametrize("scheme", ["postgresql", "redis"])
def test_store_that_is_away(colour: str, scheme: str) -> None:
    """It says what is the matter with a server that can't be reached."""
    with pytest.raises(StoreUnavailable, match="can't be reached"):
        ping(colour, f"{scheme}://{NOWHERE}/0")


@pytest.mark.parametrize("colour", COLOURS)
def test_store_without_tables(empty_postgres_url: str, colour: str) -> None:
    """A database that answers, and has no tables, is not ready."""
    with pytest.raises(StoreNotReady, match="semel migrate"):
        ping(colour, empty_postgres_url)


@pytest.mark.parametrize("colour", COLOURS)
def test_store_that_goes_away_and_comes_back(tmp_path: Path, colour: str) -> None:
    """A process that was connected notices that its server is gone, or evicts by now, and that it is back."""
    with servers.redis() as server, redis.Redis.from_url(server.url) as client, asyncio.Runner() as runner:
        keys, plain = async_store(server.url), store(server.url)

        def ask() -> None:
            plain.ping() if colour == "sync" else runner.run(keys.ping())

        ask()
        client.config_set("maxmemory-policy", "allkeys-lru")
        with pytest.raises(StoreNotReady, match="allkeys-lru"):
            ask()
        client.config_set("maxmemory-policy", "noeviction")
        ask()
        server.kill()
        with pytest.raises(StoreError):
            ask()
        server.start()
        ask()
        plain.close()
        runner.run(keys.close())


async def test_many_at_once(migrated_postgres_url: str) -> None:
    """However many ask at the same time, they use up no connections of the server; each gets the outcome."""
    async with async_store(migrated_postgres_url) as keys:
        await asyncio.gather(*(keys.ping() for _ in range(300)))
    away = async_store(f"postgresql://{NOWHERE}/0")
    outcomes = await asyncio.gather(*(away.ping() for _ in range(3)), return_exceptions=True)
    assert [type(each) for each in outcomes] == [StoreUnavailable] * 3


async def test_beside_requests(migrated_postgres_url: str) -> None:
    """It gets in the way of no request, and none in its."""
    lease = timedelta(minutes=1)
    async with async_store(migrated_postgres_url) as keys:

        async def claim() -> object:
            return await keys.perform(Claim("alice", os.urandom(8).hex(), os.urandom(16), b"f", lease, lease))

        claims = [asyncio.ensure_future(claim()) for _ in range(200)]
        await asyncio.gather(*(keys.ping() for _ in range(20)))
        assert all(isinstance(each, Hold) for each in await asyncio.gather(*claims))
