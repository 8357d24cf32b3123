"""A role that has ``synchronous_commit = off`` loses no claim and no answer of Semel's, and is warned about."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import asyncpg
import psycopg
import psycopg_pool
import pytest
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine

from semel.core.commands import Begin, Claim, Complete, Finish, Verdict
from semel.core.message import Answer
from semel.core.record import Hold
from semel.core.state import Event
from semel.stores import async_store, store
from semel.stores.base import Store
from semel.stores.connections import asyncpg as on_asyncpg
from semel.stores.connections import psycopg as on_psycopg
from semel.stores.postgres import async_store as on_loops
from semel.stores.postgres import store as on_threads
from tests.kit import servers
from tests.stores.connections.lending import do, rows

ANSWER = Answer(201, (), b"{}")

#: Sets down at each COMMIT how it is done.
WATCH = """
CREATE TABLE seen (how text);
GRANT ALL ON ALL TABLES IN SCHEMA public TO PUBLIC;
CREATE FUNCTION see() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN INSERT INTO seen VALUES (current_setting('synchronous_commit')); RETURN NULL; END $$;
CREATE CONSTRAINT TRIGGER see AFTER INSERT OR UPDATE ON semel_keys DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW EXECUTE FUNCTION see();
"""

MAKE = pytest.mark.parametrize("make", [store, async_store])


def claim(key: str = "k") -> Claim:
    return Claim("alice", key, os.urandom(16), b"fingerprint", timedelta(seconds=60), timedelta(hours=1))


@pytest.fixture
async def url(postgres_url: str) -> str:
    """A database in which COMMIT does not wait for the disk; the setting is this database's alone."""
    await asyncio.to_thread(store(postgres_url).migrate)
    await do(postgres_url, WATCH)
    await _set(postgres_url, "off")
    return postgres_url


async def _set(url: str, value: str) -> None:
    database = (await rows(url, "SELECT current_database()"))[0]
    await do(url, f"ALTER DATABASE {database} SET synchronous_commit = {value}")


async def _done(store: Any, call: Any, *arguments: Any) -> Any:
    if isinstance(store, Store):
        return await asyncio.to_thread(call, *arguments)
    return await call(*arguments)


async def guarded(given: Any) -> None:
    hold = await _done(given, given.perform, claim())
    assert isinstance(hold, Hold)
    assert await _done(given, given.perform, Complete(hold, Event.COMPLETE, ANSWER)) is Verdict.DONE
    await _done(given, given.close)


async def atomic(given: Any, *keys: str) -> None:
    for key in keys:
        transaction, mine = given.transaction(), claim(key)
        hold = await _done(given, transaction.perform, Begin(mine))
        await _done(given, transaction.perform, Finish(mine, hold, None, Event.COMPLETE, ANSWER))
    await _done(given, given.close)


@pytest.fixture
def through_a_pooler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every connection taken for a pooler's, on which no setting of a session's is kept."""

    async def is_not_direct(_connection: object) -> bool:
        return False

    for module in (on_threads, on_psycopg):
        monkeypatch.setattr(module, "is_direct", lambda _connection: False)
    for module in (on_loops, on_asyncpg):
        monkeypatch.setattr(module, "is_direct_async", is_not_direct)


@MAKE
async def test_claims_and_answers(make: Any, url: str) -> None:
    """A claim and an answer are on the disk when they are reported, whatever the database is set to."""
    await guarded(make(url))
    assert await rows(url, "SELECT how FROM seen") == ["on", "on"]


@MAKE
@pytest.mark.usefixtures("through_a_pooler")
async def test_claims_and_answers_through_a_pooler(make: Any, url: str) -> None:
    """So they are where a pooler is in between, and nothing is left set in its session."""
    await guarded(make(url))
    assert await rows(url, "SELECT how FROM seen") == ["on", "on"]


@MAKE
@pytest.mark.parametrize("value", ["local", "remote_write", "remote_apply"])
async def test_other_settings_stay(make: Any, value: str, url: str) -> None:
    """Only *off* is changed: what else an operator has chosen stays as it is."""
    await _set(url, value)
    await guarded(make(url))
    assert await rows(url, "SELECT how FROM seen") == [value, value]


@MAKE
async def test_atomic_on_own_connections(make: Any, url: str, caplog: pytest.LogCaptureFixture) -> None:
    """On connections that Semel opens, a handler's transaction is on the disk when it is answered: no warning."""
    await atomic(make(url), "a", "b")
    assert await rows(url, "SELECT how FROM seen") == ["on", "on"]
    assert caplog.records == []


@MAKE
@pytest.mark.usefixtures("through_a_pooler")
async def test_atomic_through_a_pooler(make: Any, url: str) -> None:
    """So it is where a pooler is in between."""
    await atomic(make(url), "a", "b")
    assert await rows(url, "SELECT how FROM seen") == ["on", "on"]


@pytest.mark.parametrize("kind", ["engine", "pool", "async engine", "async pool", "asyncpg pool"])
@pytest.mark.parametrize("value", ["off", "on"])
async def test_atomic_on_given_connections(kind: str, value: str, url: str, caplog: pytest.LogCaptureFixture) -> None:
    """The sessions of a given engine or pool are the application's: it is warned, once, and nothing is changed."""
    await _set(url, value)
    address = url[url.index(":") :]
    if kind == "engine":
        engine = create_engine("postgresql+psycopg" + address)
        await atomic(store(engine), "a", "b")
        engine.dispose()
    elif kind == "pool":
        with psycopg_pool.ConnectionPool(url, min_size=0, max_size=1, open=True) as pool:
            await atomic(store(pool), "a", "b")
    elif kind == "async engine":
        async_engine = create_async_engine("postgresql+asyncpg" + address)
        await atomic(async_store(async_engine), "a", "b")
        await async_engine.dispose()
    elif kind == "async pool":
        async with psycopg_pool.AsyncConnectionPool(url, min_size=0, max_size=1, open=False) as async_pool:
            await atomic(async_store(async_pool), "a", "b")
    else:
        async with asyncpg.create_pool(url, min_size=0, max_size=1) as loops_pool:
            await atomic(async_store(loops_pool), "a", "b")
    assert await rows(url, "SELECT how FROM seen") == [value, value]
    warned = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert ["synchronous_commit = off" in each.getMessage() for each in warned] == ([True] if value == "off" else [])


@pytest.fixture(scope="module")
def lazy_server() -> Iterator[servers.PostgresServer]:
    """A server that writes nothing to its disk for ten seconds, unless a COMMIT waits for it; and all is ours."""
    lazy = {"synchronous_commit": "off", "wal_writer_delay": "10s"}
    settings = lazy | {"autovacuum": "off", "wal_level": "minimal", "max_wal_senders": "0"}
    with servers.postgres(settings=settings) as server:
        yield server


@MAKE
@pytest.mark.parametrize("is_pooled", [False, True], ids=["direct", "pgbouncer"])
async def test_atomic_is_on_the_disk(make: Any, is_pooled: bool, lazy_server: servers.PostgresServer) -> None:
    """What a handler has written is on the disk when its COMMIT is answered, through PgBouncer, too."""
    url = lazy_server.url
    await asyncio.to_thread(store(url).migrate)
    with servers.pgbouncer(lazy_server) if is_pooled else nullcontext(lazy_server) as server:
        await atomic(make(server.url), f"{make.__name__} {is_pooled}")
        unwritten = "SELECT pg_current_wal_insert_lsn() - pg_current_wal_flush_lsn()"
        assert await rows(url, unwritten) == [0]


def test_nothing_is_left_set(postgres_url: str, through_a_pooler: None) -> None:
    """A session that a pooler lends to others next is left as it was."""
    made: Any = store(postgres_url)
    made.migrate()
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        name = connection.execute("SELECT current_database()").fetchall()[0][0]
        connection.execute(f"ALTER DATABASE {name} SET synchronous_commit = off".encode())
    made.perform(claim())
    link = next(each for each in made._links if each._connection is not None)
    assert link._connection.execute("SHOW synchronous_commit").fetchall() == [("off",)]
    made.close()
