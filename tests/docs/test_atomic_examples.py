"""The programs of atomic mode, one per driver, on the databases that they are written for."""

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest

from semel import stores
from tests.docs.served import EXAMPLES, asgi, load, wsgi

Balances = Callable[[], dict[str, int]]
Post = Callable[[str, int | None], Awaitable[httpx.Response]]

ACCOUNTS = (EXAMPLES / "atomic" / "accounts.sql").read_text()
BALANCES = "SELECT name, balance FROM accounts"


@pytest.fixture
def postgres_url(migrated_postgres_url: str) -> str:
    """The URL of a database with Semel's tables in it."""
    return migrated_postgres_url


@pytest.fixture
def postgres(postgres_url: str) -> Iterator[Balances]:
    """The accounts in PostgreSQL, beside Semel's tables."""
    with closing(stores.store(postgres_url)) as store:
        store.migrate()
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(ACCOUNTS.encode())
        yield lambda: dict(connection.execute(BALANCES).fetchall())


@pytest.fixture
def sqlite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Balances]:
    """The accounts in the file that the example names."""
    monkeypatch.chdir(tmp_path)
    with closing(sqlite3.connect("bank.db")) as connection:
        connection.executescript(ACCOUNTS)
        yield lambda: dict(connection.execute(BALANCES).fetchall())


async def check(post: Post, balances: Balances) -> None:
    """A transfer is made once, a refused one is kept, and a failed one leaves nothing: neither money nor key."""
    first, again = await post("one", 30), await post("one", 30)
    assert first.json() == again.json() == {"moved": 30, "left": 70}
    assert (first.status_code, again.headers.get("idempotent-replayed")) == (201, "true")
    poor = [await post("two", 80), await post("two", 80)]
    assert [each.status_code for each in poor] == [402, 402]
    assert poor[1].headers["idempotent-replayed"] == "true"
    failed = [await post("three", None), await post("three", None)]
    assert [each.status_code for each in failed] == [500, 500]
    assert "idempotent-replayed" not in failed[1].headers
    assert balances() == {"alice": 70, "bob": 30}


@pytest.mark.parametrize(
    "name, scheme",
    [
        ("atomic/asyncpg_app", "postgresql"),
        ("atomic/async_psycopg_app", "postgresql"),
        ("atomic/async_sqlalchemy_app", "postgresql+asyncpg"),
    ],
)
async def test_async(
    name: str, scheme: str, postgres: Balances, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On an event loop, with each driver, the transfer and its answer are one commit."""
    monkeypatch.setenv("DATABASE_URL", scheme + postgres_url[postgres_url.index(":") :])
    example = load(name)
    async with asgi(example.app) as client:
        await check(lambda key, amount: post(client, key, amount), postgres)
        moved = await asyncio.gather(*[post(client, f"race-{n % 2}", 5) for n in range(8)])
    assert {each.status_code for each in moved} <= {201, 409}
    assert postgres() == {"alice": 60, "bob": 40}
    if hasattr(example, "engine"):
        await example.engine.dispose()


@pytest.mark.parametrize(
    "name, scheme", [("atomic/psycopg_app", "postgresql"), ("atomic/sqlalchemy_app", "postgresql+psycopg")]
)
async def test_sync(
    name: str, scheme: str, postgres: Balances, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In threads, with each driver, the transfer and its answer are one commit."""
    monkeypatch.setenv("DATABASE_URL", scheme + postgres_url[postgres_url.index(":") :])
    example = load(name)
    await check_flask(example, postgres)
    if hasattr(example, "pool"):
        example.pool.close()
    else:
        example.sessions.kw["bind"].dispose()


async def test_sqlite3(sqlite: Balances) -> None:
    """In one file, the transfer and its answer are one commit."""
    await check_flask(load("atomic/sqlite3_app"), sqlite)


async def check_flask(example: Any, balances: Balances) -> None:
    with wsgi(example.app, example.app.wsgi_app) as client:

        async def send(key: str, amount: int | None) -> httpx.Response:
            return client.post("/transfers", json=order(amount), headers={"Idempotency-Key": key})

        await check(send, balances)


async def post(client: httpx.AsyncClient, key: str, amount: int | None) -> httpx.Response:
    return await client.post("/transfers", json=order(amount), headers={"Idempotency-Key": key})


def order(amount: int | None) -> dict[str, int]:
    """Without an amount, every handler fails."""
    return {} if amount is None else {"amount": amount}
