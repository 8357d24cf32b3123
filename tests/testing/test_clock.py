"""A clock that tests move: leases and retentions run out on every store, as the requests of an application see it."""

import sqlite3
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine

from semel import SINGLE_TENANT, Policy, stores
from semel.asgi import IdempotencyMiddleware
from semel.core.commands import Claim, Now, TakeOver
from semel.core.record import Found, Hold
from semel.errors import ConfigurationError
from semel.stores import AsyncStore, Store
from semel.stores.memory import AsyncMemoryStore, MemoryStore
from semel.stores.tiered import Tiered
from semel.testing import Clock
from semel.testing.conformance import handle

DAY = timedelta(days=1)
LEASE = timedelta(seconds=30)
KEY = {"Idempotency-Key": "k"}
KINDS = ["memory", "sqlite", "postgres", "redis", "tiered in memory", "tiered over postgres"]


@pytest.fixture
def postgres_url(migrated_postgres_url: str) -> str:
    """The URL of a database with Semel's tables in it."""
    return migrated_postgres_url


@pytest.fixture(params=KINDS)
def where(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    kind = request.param
    if kind == "memory":
        return MemoryStore()
    if kind == "redis":
        return request.getfixturevalue("redis_url")
    if kind == "sqlite":
        return f"sqlite:///{tmp_path}/semel.db"
    if kind == "tiered in memory":
        return Tiered(f"sqlite:///{tmp_path}/semel.db")
    url = request.getfixturevalue("postgres_url")
    with closing(stores.store(url)) as store:
        store.migrate()
    return url if kind == "postgres" else Tiered(url, request.getfixturevalue("redis_url"))


def opened(where: Any, colour: str) -> Store | AsyncStore:
    if isinstance(where, MemoryStore):
        return where if colour == "sync" else AsyncMemoryStore(memory=where)
    return stores.store(where) if colour == "sync" else stores.async_store(where)


@pytest.mark.parametrize("colour", ["sync", "async"])
def test_leases_and_retentions_run_out(where: Any, colour: str) -> None:
    """A lease is over when its time is, and not a moment before; after its retention a record is a new one."""
    store = opened(where, colour)
    asked = handle(store)
    # A tiered store has something in the memory of the process; any other is found by its address.
    clock = Clock(store if isinstance(where, Tiered | MemoryStore) else where)
    claim = Claim("alice", "k", b"1" * 16, b"", LEASE, DAY, "rerun", "delete", None)
    first = asked.perform(claim)
    assert isinstance(first, Hold)
    clock.advance(LEASE - timedelta(seconds=5))
    found = asked.perform(claim)
    assert isinstance(found, Found)
    assert not found.lease_is_over
    clock.advance(timedelta(seconds=6))
    found = asked.perform(claim)
    assert isinstance(found, Found)
    assert found.lease_is_over
    again = Claim("alice", "k", b"2" * 16, b"", LEASE, DAY, "rerun", "delete", None)
    taken = asked.perform(TakeOver(again, first))
    assert isinstance(taken, Hold)
    assert taken.attempt == 2
    clock.advance(DAY)
    found = asked.perform(claim)
    assert isinstance(found, Found)
    assert found.is_expired
    asked.close()


def test_no_time_and_ten_years(where: Any) -> None:
    """A clock may be moved by nothing, and by ten years, which is how long the result of `once` is kept."""
    store = opened(where, "sync")
    asked = handle(store)
    clock = Clock(store if isinstance(where, Tiered | MemoryStore) else where)
    claim = Claim("alice", "k", b"1" * 16, b"", LEASE, 3650 * DAY, "rerun", "delete", None)
    assert isinstance(asked.perform(claim), Hold)
    clock.advance(timedelta(0))
    found = asked.perform(claim)
    assert isinstance(found, Found)
    assert not found.lease_is_over
    clock.advance(3651 * DAY)
    found = asked.perform(claim)
    assert isinstance(found, Found)
    assert found.is_expired
    asked.close()


async def test_an_answer_is_kept_for_its_retention(where: Any) -> None:
    """A retry is a replay until the retention is over, and then a new operation: on a loop, and with caches."""
    runs: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        runs.append(1)
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    store = opened(where, "async")
    assert isinstance(store, AsyncStore)
    clock = Clock(store)
    guarded = IdempotencyMiddleware(app, store=store, scope=SINGLE_TENANT, policy=Policy.ietf(retention=DAY))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(guarded), base_url="http://test") as client:
        for hours in (0, 23):
            await clock.aadvance(timedelta(hours=hours))
            await client.post("/", headers=KEY)
        assert len(runs) == 1
        await clock.aadvance(timedelta(hours=2))
        answer = await client.post("/", headers=KEY)
        assert "idempotent-replayed" not in answer.headers
        await client.post("/", headers=KEY)
        assert len(runs) == 2
    await store.close()


def test_the_store_s_own_time_stays(sqlite_url: str) -> None:
    """What is stored is made older; the store's own clock is the database's, and nothing can move that."""
    with closing(stores.store(sqlite_url)) as store:
        before = store.perform(Now())
        Clock(sqlite_url).advance(DAY)
        assert store.perform(Now()) - before < timedelta(hours=1)


def test_an_engine_says_where_it_is(postgres_url: str, tmp_path: Path) -> None:
    """What the application gives to the middleware can be given to the clock: an engine, of either colour."""
    with closing(stores.store(postgres_url)) as store:
        store.migrate()
    Clock(create_engine(postgres_url.replace("postgresql://", "postgresql+psycopg://"))).advance(DAY)
    Clock(create_async_engine(postgres_url.replace("postgresql://", "postgresql+asyncpg://"))).advance(DAY)
    Clock(create_engine(f"sqlite:///{tmp_path}/semel.db")).advance(DAY)


def test_a_store_that_is_not_there_yet(tmp_path: Path) -> None:
    """Time may pass before anything is stored: nothing is made of it."""
    path = tmp_path / "semel.db"
    Clock(f"sqlite:///{path}").advance(DAY)
    assert not path.exists()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE orders (id)")
    Clock(f"sqlite:///{path}").advance(DAY)


@pytest.mark.parametrize("given", ["memory://", Tiered("memory://")])
def test_what_is_in_the_memory_of_a_process(given: Any) -> None:
    """A URL does not lead to the records of a store in memory: the clock asks for the store itself."""
    with pytest.raises(ConfigurationError, match="Give the store itself"):
        Clock(given)


@pytest.mark.parametrize("duration", [timedelta(seconds=-1), 5])
def test_time_goes_forward(duration: Any) -> None:
    """Time is a timedelta, and never goes back."""
    with pytest.raises(ConfigurationError, match="forward"):
        Clock(MemoryStore()).advance(duration)
