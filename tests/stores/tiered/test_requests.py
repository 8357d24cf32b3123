"""Every entry point takes a ``Tiered`` where it takes a store, and a replay then asks the durable store nothing."""

import asyncio
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import flask
import httpx
import pytest
from fastapi import Depends, FastAPI
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

import semel
from semel import Operation, Policy, functions, stores
from semel.fastapi import Idempotent, install
from semel.flask import Semel, idempotent
from semel.stores.tiered import Tiered
from semel.stores.tiered.store import AsyncTieredStore, TieredStore

KEY = {"Idempotency-Key": "key-1"}
ATOMIC = Policy.ietf(mode="atomic")


class Unasked(AssertionError):
    """The durable store was asked, though the answer is kept."""


def seal(store: Any) -> None:
    """Let nobody ask the durable store any more."""

    def refuse(*_: Any) -> Any:
        raise Unasked

    assert isinstance(store, TieredStore | AsyncTieredStore)
    vars(store.durable).update(perform=refuse, transaction=refuse)


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    functions.close()


@pytest.fixture
def redis_tier(redis_url: str, sqlite_url: str) -> Tiered:
    return Tiered(sqlite_url, redis_url)


@pytest.mark.parametrize("policy", [Policy.ietf(), ATOMIC], ids=["guard", "atomic"])
async def test_fastapi(redis_tier: Tiered, policy: Policy) -> None:
    """A FastAPI app, and with it any ASGI app."""
    app = FastAPI()
    install(app, store=redis_tier, policy=policy)

    @app.post("/orders", status_code=201)
    async def order(operation: Annotated[Operation, Depends(Idempotent(scope=lambda: "alice"))]) -> dict[str, int]:
        return {"attempt": operation.attempt}

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://shop") as client:
        first = await client.post("/orders", headers=KEY)
        assert (first.status_code, first.json()) == (201, {"attempt": 1})
        middleware: Any = app.middleware_stack
        while not hasattr(middleware, "store"):
            middleware = middleware.app
        store = middleware.store
        perform, transaction = store.durable.perform, store.durable.transaction
        seal(store)
        again = await client.post("/orders", headers=KEY)
        vars(store.durable).update(perform=perform, transaction=transaction)
        assert (again.status_code, again.content) == (201, first.content)
        assert again.headers["idempotent-replayed"] == "true"
        await store.close()


@pytest.mark.parametrize("policy", [Policy.ietf(), ATOMIC], ids=["guard", "atomic"])
def test_flask(redis_tier: Tiered, policy: Policy) -> None:
    """A Flask app, from its config."""
    app = flask.Flask("shop")
    app.config.update(SEMEL_STORE=redis_tier, SEMEL_POLICY=policy, SEMEL_SCOPE=lambda: "alice")
    Semel(app)

    @app.post("/orders")
    @idempotent
    def order() -> tuple[str, int]:
        return "ordered", 201

    installed = app.extensions["semel"]
    client = app.test_client()
    assert client.post("/orders", headers=KEY).status_code == 201
    seal(installed.store)
    again = client.post("/orders", headers=KEY)
    assert (again.status_code, again.text, again.headers["Idempotent-Replayed"]) == (201, "ordered", "true")
    installed.store.cache.close()


def test_flask_sqlalchemy(redis_url: str, tmp_path: Path) -> None:
    """Flask-SQLAlchemy's own session is the transaction of a view, and a replay opens none."""
    app = flask.Flask("shop")
    app.config["SQLALCHEMY_DATABASE_URI"] = f"sqlite:///{tmp_path / 'shop.db'}"
    db = SQLAlchemy(app, model_class=type("Base", (DeclarativeBase,), {}))

    class Order(db.Model):  # type: ignore[misc, name-defined]  # as Flask-SQLAlchemy has it
        id: Mapped[int] = mapped_column(primary_key=True)

    with app.app_context():
        db.create_all()
    Semel(app, store=Tiered(db, redis_url), scope=lambda: "alice", policy=ATOMIC)

    @app.post("/orders")
    @idempotent
    def order() -> tuple[str, int]:
        db.session.add(Order())
        return "ordered", 201

    installed = app.extensions["semel"]
    client = app.test_client()
    assert client.post("/orders", headers=KEY).status_code == 201
    transaction = installed.store.durable.transaction
    seal(installed.store)
    again = client.post("/orders", headers=KEY)
    assert (again.status_code, again.headers["Idempotent-Replayed"]) == (201, "true")
    installed.store.durable.transaction = transaction
    with app.app_context():
        assert db.session.query(Order).count() == 1
        db.engine.dispose()
    installed.store.close()


def test_functions(redis_tier: Tiered) -> None:
    """Plain functions that name the same tiers share one store."""
    runs: list[int] = []

    def send(number: int) -> str:
        runs.append(number)
        return "sent"

    one, other = (functions.idempotent(key="number", store=redis_tier, name="send")(send) for _ in range(2))
    assert one(1) == one(1) == other(1) == "sent"
    assert runs == [1]
    functions.close()
    assert one(1) == "sent"
    assert runs == [1]


def test_async_functions(redis_tier: Tiered) -> None:
    """Async functions too; the end of the loop closes what they have opened."""
    runs: list[int] = []

    @functions.idempotent(key="number", store=redis_tier, name="send")
    async def send(number: int) -> str:
        runs.append(number)
        return "sent"

    async def twice() -> list[str]:
        return [await send(1), await send(1)]

    for _ in range(2):
        assert asyncio.run(twice()) == ["sent", "sent"]
    gc.collect()
    assert runs == [1]


def test_an_engine_below(tmp_path: Path, redis_url: str) -> None:
    """What is durable may be the application's own engine, which its transactions then come from."""
    engine = create_engine(f"sqlite:///{tmp_path / 'shop.db'}")
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE sent (number int)"))

    @functions.idempotent(key="number", store=Tiered(engine, redis_url), policy=ATOMIC, name="send")
    def send(number: int) -> str:
        semel.current().connection.execute(text("INSERT INTO sent VALUES (:number)"), {"number": number})
        return "sent"

    assert send(1) == send(1) == "sent"
    functions.close()
    with engine.connect() as connection:
        assert connection.execute(text("SELECT number FROM sent")).scalars().all() == [1]
    engine.dispose()


async def test_an_async_engine_below(tmp_path: Path, redis_url: str) -> None:
    """The same on an event loop."""
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'shop.db'}")
    async with engine.begin() as connection:
        await connection.execute(text("CREATE TABLE sent (number int)"))
    store = stores.async_store(Tiered(engine, redis_url))

    @functions.idempotent(key="number", store=store, policy=ATOMIC, name="send")
    async def send(number: int) -> str:
        await semel.current().connection.execute(text("INSERT INTO sent VALUES (:number)"), {"number": number})
        return "sent"

    assert await send(1) == await send(1) == "sent"
    await store.close()
    await engine.dispose()


@pytest.mark.parametrize("made", [stores.store, stores.async_store], ids=["threads", "loop"])
def test_a_store_that_does_not_say_where_it_is(made: Callable[[Any], Any], redis_url: str) -> None:
    """A store of another's making needs a namespace in a Redis that it may share, and needs none in memory."""
    kind = stores.Store if made is stores.store else stores.AsyncStore
    strange = type("StrangeStore", (kind,), dict.fromkeys(kind.__abstractmethods__))()
    with pytest.raises(semel.errors.ConfigurationError, match=r"StrangeStore does not say where it is.*namespace="):
        made(Tiered(strange, redis_url))
    made(Tiered(strange, redis_url, namespace="strange"))
    made(Tiered(strange))
