"""`crash_everywhere` kills an endpoint at every step: right ones pass, and of wrong ones it says what is wrong, where.

Each app makes an order in its database and charges a card; what a provider is asked to do twice with one key it does
once, and what it is asked without a key it does each time.
"""

import asyncio
import inspect
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any
from uuid import uuid4

import flask
import psycopg
import pytest
from fastapi import Depends, FastAPI
from sqlalchemy import create_engine, text
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

import semel
import semel.flask
from semel import SINGLE_TENANT, Operation, Policy, in_thread, stores
from semel.asgi import IdempotencyMiddleware
from semel.errors import ConfigurationError
from semel.fastapi import Idempotent, install
from semel.stores.memory import AsyncMemoryStore, MemoryStore
from semel.testing import Clock, CrashReport, Request, acrash_everywhere, crash_everywhere
from semel.wsgi import IdempotencyMiddleware as WSGIMiddleware

ORDER = Request("POST", "/orders", json={"amount": 5})


class Provider:
    """Charges cards, once for each key; without a key, each time."""

    def __init__(self) -> None:
        self.charges: dict[str, int] = {}

    def charge(self, amount: int, *, idempotency_key: str) -> str:
        self.charges.setdefault(idempotency_key, amount)
        return f"ch_{idempotency_key[:6]}"

    def charge_blindly(self, amount: int, **_: Any) -> str:
        self.charges[uuid4().hex] = amount
        return "ch"


class Shop:
    """A database with orders, and what is counted of it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.is_postgres = url.startswith("postgresql")
        self.provider = Provider()
        self.clock = Clock(url)
        self._engine = create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
        with self._engine.begin() as connection:
            connection.execute(text("CREATE TABLE orders (amount integer)"))

    def effects(self) -> dict[str, int]:
        with self._engine.connect() as connection:
            orders = connection.execute(text("SELECT count(*) FROM orders")).scalar_one()
        return {"orders": orders, "charges": len(self.provider.charges)}

    def insert(self, connection: Any, amount: int) -> int:
        connection.execute(f"INSERT INTO orders VALUES ({amount})")
        return amount

    async def insert_async(self, connection: Any, amount: int) -> int:
        await connection.execute(f"INSERT INTO orders VALUES ({amount})")
        return amount

    def insert_alone(self, amount: int) -> None:
        with self._engine.begin() as connection:
            connection.execute(text(f"INSERT INTO orders VALUES ({amount})"))

    def close(self) -> None:
        self._engine.dispose()


@pytest.fixture
def postgres_url(migrated_postgres_url: str) -> str:
    """The URL of a database with Semel's tables in it."""
    return migrated_postgres_url


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.slow)])  # It walks there for minutes.
def shop(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shop]:
    is_sqlite = request.param == "sqlite"
    url = f"sqlite:///{tmp_path}/shop.db" if is_sqlite else request.getfixturevalue("postgres_url")
    with closing(stores.store(url)) as store:
        store.migrate()
    with closing(Shop(url)) as made:
        yield made


Handler = Callable[[Shop, Operation], Any]


def wsgi(shop: Shop, handler: Handler, **policy: Any) -> WSGIMiddleware:
    def app(environ: Any, start_response: Any) -> list[bytes]:
        handler(shop, semel.current())
        start_response("201 Created", [("Content-Type", "text/plain")])
        return [b"ordered"]

    return WSGIMiddleware(app, store=shop.url, scope=SINGLE_TENANT, policy=Policy.ietf(**policy))


def walked(shop: Shop, app: Any, request: Any = ORDER) -> CrashReport:
    report = crash_everywhere(app, request, clock=shop.clock, effects=shop.effects)
    if isinstance(app, WSGIMiddleware):
        app.guard.leases.close()
        app.store.close()
    return report


def in_steps(shop: Shop, operation: Operation) -> None:
    operation.phase("order_created", shop.insert, 5)
    operation.effect("card_charged", shop.provider.charge, 5)


def names(report: CrashReport) -> list[str]:
    return [point.name for point in report.points]


AROUND = ["asking for the user of the request", "reading the body", "claiming the key"]
PHASE = ["opening the transaction of the phase {}", "calling the function of the phase {}", "committing the phase {}"]
EFFECT = ["recording the effect {}", "calling the effect {}", "recording the effect {}"]


def both(*places: str) -> list[str]:
    return [f"{when} {place}" for place in places for when in ("before", "after")]


def test_steps_are_taken_once(shop: Shop) -> None:
    """An endpoint of a phase and an effect is killed before and after each of its steps, and does each thing once."""
    report = walked(shop, wsgi(shop, in_steps))
    report.assert_once()
    steps = [each.format("'order_created'") for each in PHASE] + [each.format("'card_charged'") for each in EFFECT]
    assert names(report) == [
        *both(*AROUND),
        "before running the handler",
        *both(*steps),
        "after running the handler",
        *both("storing the answer"),
    ]
    assert report.expected == {"orders": 1, "charges": 1}
    assert all(point.effects == {"orders": 1, "charges": 1} for point in report.points)
    assert all([answer.status for answer in point.answers] == [201, 201] for point in report.points)
    assert "22 crashes" in str(report)
    assert "after committing the phase 'order_created': 201 201" in str(report)


def test_atomic_mode_is_all_or_nothing(shop: Shop) -> None:
    """In atomic mode the order and its answer are committed together, wherever the process dies."""
    report = walked(
        shop, wsgi(shop, lambda shop, operation: shop.insert(operation.connection, 5), mode="atomic", required=True)
    )
    report.assert_once()
    assert names(report) == [
        *both(*AROUND[:2]),
        *both("beginning the transaction and locking the key", "running the handler"),
        *both("committing the transaction with the answer"),
    ]


def test_a_charge_in_the_handler_is_made_twice(shop: Shop) -> None:
    """A handler that charges outside of an effect charges again when it is run again: the report says where."""

    def handler(shop: Shop, operation: Operation) -> None:
        operation.phase("order_created", shop.insert, 5)
        shop.provider.charge_blindly(5)

    report = walked(shop, wsgi(shop, handler))
    with pytest.raises(AssertionError) as said:
        report.assert_once()
    assert "2 of 16 crashes have a wrong result" in str(said.value)
    assert "after running the handler: charges 2 instead of 1: done more than once" in str(said.value)
    assert "before storing the answer: charges 2 instead of 1" in str(said.value)


def test_a_phase_that_calls_a_provider_calls_it_twice(shop: Shop) -> None:
    """A phase is rolled back when the process dies, and the call of a provider in it is not."""

    def order_and_charge(connection: Any, amount: int) -> None:
        shop.insert(connection, amount)
        shop.provider.charge_blindly(amount)

    report = walked(shop, wsgi(shop, lambda _, operation: operation.phase("order_created", order_and_charge, 5)))
    assert [line.partition(":")[0] for line in report.wrong()] == [
        "after calling the function of the phase 'order_created'",
        "before committing the phase 'order_created'",
    ]


def test_a_handler_of_its_own_transactions_repeats_them(shop: Shop) -> None:
    """A guarded handler that writes on its own is run again by default; refused, it is parked for an operator."""
    again = walked(shop, wsgi(shop, lambda shop, _: shop.insert_alone(5)))
    assert again.wrong() == [
        f"{when}: orders 2 instead of 1: done more than once"
        for when in ("after running the handler", "before storing the answer")
    ]
    refused = walked(shop, wsgi(shop, lambda shop, _: shop.insert_alone(5), on_crash="refuse"))
    assert any("parked for an operator" in line for line in refused.wrong())
    refused.assert_once(allow_parked=True)


def test_an_effect_that_is_parked(shop: Shop) -> None:
    """A provider without keys and `on_unknown="park"`: never twice, and parked where the outcome is unknown."""

    def handler(shop: Shop, operation: Operation) -> None:
        operation.effect("card_charged", shop.provider.charge_blindly, 5, on_unknown="park")

    report = walked(shop, wsgi(shop, handler))
    report.assert_once(allow_parked=True)
    assert [point.name for point in report.points if point.is_parked] == [
        "after recording the effect 'card_charged'",
        *both("calling the effect 'card_charged'"),
        "before recording the effect 'card_charged'",
    ]
    with pytest.raises(AssertionError, match="parked for an operator"):
        report.assert_once()


def test_an_operation_that_never_ends(shop: Shop) -> None:
    """An endpoint that fails on every attempt but the first is reported as one that never ends."""

    def handler(shop: Shop, operation: Operation) -> None:
        operation.phase("order_created", shop.insert, 5)
        if operation.attempt > 1:
            raise semel.NoEffect("not now")

    report = walked(shop, wsgi(shop, handler))
    assert any("no final answer after 8 tries" in line for line in report.wrong())


def test_nothing_crashed_is_a_failure(shop: Shop) -> None:
    """A run in which nothing crashed proves nothing: a request that is not guarded, or that is refused, fails."""
    with pytest.raises(AssertionError, match=r"^nothing was crashed"):
        walked(shop, lambda environ, start: start("200 OK", []) and [], ORDER).assert_once()
    with pytest.raises(AssertionError, match=r"^without a crash nothing takes effect"):
        walked(shop, wsgi(shop, lambda *_: None)).assert_once()
    with pytest.raises(AssertionError, match=r"^without a crash the answer is 400"):
        walked(shop, wsgi(shop, in_steps, strict=True)).assert_once()


@pytest.mark.parametrize("colour", ["async", "sync"])
def test_fastapi(shop: Shop, colour: str) -> None:
    """A FastAPI app with its dependencies and its lifespan, async or plain endpoint, does each thing once."""
    app = FastAPI()
    install(app, store=shop.url)
    guard = Annotated[Operation, Depends(Idempotent(scope=SINGLE_TENANT))]

    if colour == "async":

        @app.post("/orders", status_code=201)
        async def order(body: dict[str, int], operation: guard) -> dict[str, Any]:
            insert = shop.insert_async if shop.is_postgres else in_thread(shop.insert)
            await operation.phase("order_created", insert, body["amount"])
            return {"charge": await operation.effect("card_charged", in_thread(shop.provider.charge), 5)}
    else:

        @app.post("/orders", status_code=201)
        def order_here(body: dict[str, int], operation: guard) -> dict[str, Any]:
            insert: Any = shop.insert_async if shop.is_postgres else shop.insert
            operation.phase("order_created", insert, body["amount"])
            return {"charge": operation.effect("card_charged", shop.provider.charge, 5)}

    report = walked(shop, app)
    report.assert_once()
    assert len(report.points) == 22
    assert all(point.effects == {"orders": 1, "charges": 1} for point in report.points)


def test_a_broken_fastapi_app(shop: Shop) -> None:
    """A charge made directly in an async endpoint is seen to be made twice."""
    app = FastAPI()
    app.add_middleware(IdempotencyMiddleware, store=shop.url, scope=SINGLE_TENANT)

    @app.post("/orders", status_code=201)
    async def order() -> None:
        shop.provider.charge_blindly(5)

    assert walked(shop, app).wrong() == [
        "after running the handler: charges 2 instead of 1: done more than once",
        "before storing the answer: charges 2 instead of 1: done more than once",
    ]


def test_atomic_mode_on_a_loop(shop: Shop) -> None:
    """The same in atomic mode, on the async connection that the app is given."""

    async def endpoint(_request: Any) -> PlainTextResponse:
        inserted = (shop.insert_async if shop.is_postgres else shop.insert)(semel.current().connection, 5)
        if inspect.isawaitable(inserted):
            await inserted
        return PlainTextResponse("ordered", 201)

    app = Starlette(routes=[Route("/orders", endpoint, methods=["POST"])])
    app.add_middleware(IdempotencyMiddleware, store=shop.url, scope=SINGLE_TENANT, policy=Policy.ietf(mode="atomic"))
    report = walked(shop, app)
    report.assert_once()
    assert len(report.points) == 10


def test_flask(shop: Shop) -> None:
    """A Flask view with steps, guarded by its decorator."""
    app = flask.Flask("shop")
    installed = semel.flask.Semel(app, store=shop.url, scope=SINGLE_TENANT)

    @app.post("/orders")
    @semel.flask.idempotent
    def order() -> tuple[dict[str, int], int]:
        in_steps(shop, semel.current())
        return {"amount": flask.request.get_json()["amount"]}, 201

    report = walked(shop, app)
    report.assert_once()
    assert len(report.points) == 22
    assert installed is not None
    app.extensions["semel"].close()


async def test_on_the_running_loop(tmp_path: Path) -> None:
    """In an async test it is awaited; so may be what counts effects, and what makes another request each time."""
    memory = MemoryStore()
    made: list[int] = []
    asked = iter(range(1000))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await semel.current().phase("made", in_thread(lambda _: made.append(1)))
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": b"made"})

    async def count() -> int:
        await asyncio.sleep(0)
        return len(made)

    async def order() -> Request:
        await asyncio.sleep(0)
        return Request("POST", f"/orders/{next(asked)}")

    guarded = IdempotencyMiddleware(app, store=AsyncMemoryStore(memory=memory), scope=SINGLE_TENANT)
    report = await acrash_everywhere(guarded, order, clock=Clock(memory), effects=count)
    # Memory has no transaction: what the function did stays when the process dies before the commit.
    assert {line.partition(":")[0] for line in report.wrong()} == {
        "after calling the function of the phase 'made'",
        "before committing the phase 'made'",
    }
    assert next(asked) == len(report.points) + 2
    with pytest.raises(ConfigurationError, match="await acrash_everywhere"):
        crash_everywhere(guarded, ORDER, clock=Clock(memory), effects=lambda: 0)


def test_it_leaves_no_trace(shop: Shop) -> None:
    """After the walk, no process dies any more, and no transaction is open."""
    walked(shop, wsgi(shop, in_steps))
    app = wsgi(shop, in_steps)
    before = shop.effects()
    assert walked(shop, app).answer.status == 201
    assert shop.effects()["orders"] > before["orders"]
    if shop.is_postgres:
        with psycopg.connect(shop.url) as connection:
            [(idle,)] = connection.execute("SELECT count(*) FROM pg_stat_activity WHERE state LIKE 'idle in%'")
        assert idle == 0
    else:
        with closing(sqlite3.connect(shop.url.removeprefix("sqlite:///"), timeout=0.1)) as file, file:
            file.execute("INSERT INTO orders VALUES (1)")
