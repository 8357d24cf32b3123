"""SEMEL_ENFORCEMENT: every guard of a process is switched off, or to report mode, without a line of code."""

import asyncio
import logging
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Annotated, Any
from wsgiref.types import StartResponse, WSGIEnvironment

import flask
import psycopg
import pytest
from fastapi import Depends, FastAPI
from starlette.applications import Starlette
from starlette.requests import Request as StarletteRequest
from starlette.responses import JSONResponse
from starlette.routing import Route

import semel
import semel.asgi
import semel.flask
import semel.wsgi
from semel import Operation, Policy
from semel.core.commands import Browse
from semel.errors import ConfigurationError, NotGuarded
from semel.fastapi import Idempotent, install
from semel.functions import idempotent
from semel.guard.request import switch
from semel.stores.memory import AsyncMemoryStore, MemoryStore
from tests.web.harness import HANG_SECONDS, Request, Response, call_asgi, call_wsgi

SEND = Request(lines=(("Idempotency-Key", b"key-1"), ("Content-Length", b"2")), body=b"{}")
Settings = Callable[[str], None]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[Settings]:
    """Say in the environment what is to be done, as at the start of a process."""

    def say(value: str) -> None:
        monkeypatch.setenv("SEMEL_ENFORCEMENT", value)
        switch.cache_clear()

    yield say
    switch.cache_clear()


class Shop:
    """A handler that takes steps, behind one of the guards."""

    def __init__(self) -> None:
        self.memory = MemoryStore()
        self.runs = 0
        self.keys: list[str] = []
        self.send: Callable[[], Response]
        self.app: Any = None

    @property
    def records(self) -> int:
        return len(self.memory.perform(Browse(limit=10)))

    def create(self, _connection: object) -> int:
        self.runs += 1
        return self.runs

    def charge(self, *, idempotency_key: str) -> str:
        self.keys.append(idempotency_key)
        return idempotency_key

    def pay(self) -> dict[str, Any]:
        operation = semel.current()
        created = operation.phase("created", self.create)
        return {"created": created, "charge": operation.effect("charged", self.charge)}

    async def apay(self, operation: Operation | None = None) -> dict[str, Any]:
        operation = operation or semel.current()
        created = await operation.phase("created", semel.in_thread(self.create))
        return {"created": created, "charge": await operation.effect("charged", semel.in_thread(self.charge))}


def asgi(shop: Shop, policy: Policy) -> None:
    async def pay(_request: StarletteRequest) -> JSONResponse:
        return JSONResponse(await shop.apay(), 201)

    app = Starlette(routes=[Route("/pay", pay, methods=["POST"])])
    store = AsyncMemoryStore(memory=shop.memory)
    guarded = semel.asgi.IdempotencyMiddleware(app, store=store, scope=semel.SINGLE_TENANT, policy=policy)
    shop.send = lambda: asyncio.run(asyncio.wait_for(call_asgi(guarded, SEND), HANG_SECONDS))


def fastapi(shop: Shop, policy: Policy) -> None:
    app = FastAPI()
    install(app, store=AsyncMemoryStore(memory=shop.memory))
    guard = Idempotent(scope=semel.SINGLE_TENANT, policy=policy)

    @app.post("/pay", status_code=201)
    async def pay(operation: Annotated[Operation, Depends(guard)]) -> dict[str, Any]:
        return await shop.apay(operation)

    shop.send = lambda: asyncio.run(asyncio.wait_for(call_asgi(app, SEND), HANG_SECONDS))


def wsgi(shop: Shop, policy: Policy) -> None:
    app = flask.Flask("shop")
    app.post("/pay")(lambda: (shop.pay(), 201))
    shop.app = semel.wsgi.IdempotencyMiddleware(app, store=shop.memory, scope=semel.SINGLE_TENANT, policy=policy)
    shop.send = lambda: call_wsgi(shop.app, SEND)


def decorator(shop: Shop, policy: Policy) -> None:
    app = flask.Flask("shop")
    semel.flask.Semel(app, store=shop.memory, scope=semel.SINGLE_TENANT, policy=policy)
    app.post("/pay")(semel.flask.idempotent(lambda: (shop.pay(), 201)))
    shop.send = lambda: call_wsgi(app, SEND)


ENTRIES = [asgi, fastapi, wsgi, decorator]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda each: each.__name__)
def test_off(entry: Callable[[Shop, Policy], None], told: Settings) -> None:
    """With "off" nothing is claimed, kept or replayed; a handler's steps are taken, with the keys they always have."""
    guarded = Shop()
    entry(guarded, Policy.ietf())
    assert guarded.send().status == 201
    assert guarded.send().is_replay
    told("off")
    shop = Shop()
    entry(shop, Policy.ietf(required=True))
    answers = [shop.send(), shop.send()]
    assert [(each.status, each.is_replay) for each in answers] == [(201, False)] * 2
    assert (shop.runs, shop.records) == (2, 0)
    assert set(shop.keys) == set(guarded.keys), "The provider must know the operation by the same key."
    with pytest.raises(LookupError):
        semel.current()


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda each: each.__name__)
def test_off_is_not_for_atomic_mode(entry: Callable[[Shop, Policy], None], told: Settings) -> None:
    """An atomic handler writes through the guard's own transaction, so its guard stays."""
    told("off")
    shop = Shop()
    entry(shop, Policy.ietf(mode="atomic"))
    shop.pay = lambda: {"is_open": semel.current().connection is None}  # type: ignore[method-assign]

    async def apay(operation: Operation | None = None) -> dict[str, Any]:
        return shop.pay()

    shop.apay = apay  # type: ignore[method-assign]
    assert [shop.send().is_replay, shop.send().is_replay] == [False, True]


def test_atomic_inside_of_what_is_off(told: Settings) -> None:
    """A guard that is switched off is no guard to an atomic one inside of it, which stays."""
    told("off")
    shop = Shop()
    wsgi(shop, Policy.ietf(mode="atomic"))
    shop.pay = lambda: {"is_open": semel.current().connection is None}  # type: ignore[method-assign]
    outer = semel.wsgi.IdempotencyMiddleware(shop.app, store=shop.memory, scope=semel.SINGLE_TENANT)
    assert [call_wsgi(outer, SEND).is_replay for _ in range(2)] == [False, True]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda each: each.__name__)
def test_report(entry: Callable[[Shop, Policy], None], told: Settings, caplog: pytest.LogCaptureFixture) -> None:
    """With "report" every request runs as it comes, and what enforcing would have done is told."""
    told("report")
    shop = Shop()
    entry(shop, Policy.ietf())
    shop.pay = lambda: {"runs": shop.create(None)}  # type: ignore[method-assign]

    async def apay(operation: Operation | None = None) -> dict[str, Any]:
        return shop.pay()

    shop.apay = apay  # type: ignore[method-assign]
    with caplog.at_level(logging.INFO, logger="semel"):
        assert [shop.send().is_replay, shop.send().is_replay] == [False, False]
    assert shop.runs == 2
    assert "outcome=replay" in caplog.text


def test_off_while_a_generator_answers(told: Settings) -> None:
    """A WSGI app that is a generator has its operation until its last chunk, and when it is closed."""
    seen: list[str] = []

    def app(_environ: WSGIEnvironment, start_response: StartResponse) -> Iterator[bytes]:
        start_response("201 Created", [("Content-Type", "text/plain")])
        try:
            yield semel.current().key.encode()
            yield semel.current().key.encode()
        finally:
            seen.append(semel.current().key)

    told("off")
    guarded = semel.wsgi.IdempotencyMiddleware(app, store="memory://", scope=semel.SINGLE_TENANT)
    assert call_wsgi(guarded, SEND).body == b"key-1key-1"
    assert seen == ["key-1"]
    with pytest.raises(NotGuarded):
        semel.current()


def test_functions(told: Settings) -> None:
    """A guarded function runs each time with "off", in either colour; there is nothing to report of it."""
    memory = MemoryStore()
    calls: list[str] = []

    @idempotent(key="order", store=memory, name="bill")
    def bill(order: str) -> str:
        calls.append(semel.current().derive("bill"))
        return order

    @idempotent(key="order", store=AsyncMemoryStore(memory=memory), name="ship")
    async def ship(order: str) -> str:
        calls.append(semel.current().derive("ship"))
        return order

    told("off")
    assert [bill("1"), bill("1")] == ["1", "1"]
    assert [asyncio.run(ship("1")), asyncio.run(ship("1"))] == ["1", "1"]
    assert len(calls) == 4
    told("report")
    assert [bill("1"), bill("1")] == ["1", "1"]
    assert len(calls) == 5


@pytest.mark.parametrize("value", ["off", "report"])
def test_said_loudly_and_once(value: str, told: Settings, caplog: pytest.LogCaptureFixture) -> None:
    """That guards are switched off is said in the log at the start, once in each process, and what stays."""
    told(value)
    for _ in range(2):
        asgi(Shop(), Policy.ietf())
    (record,) = [each for each in caplog.records if "SEMEL_ENFORCEMENT" in each.getMessage()]
    assert record.levelno >= logging.WARNING
    assert "atomic" in record.getMessage()


@pytest.mark.parametrize("value", ["on", "OFF ", "false", "0"])
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda each: each.__name__)
def test_what_it_can_not_be(entry: Callable[[Shop, Policy], None], value: str, told: Settings) -> None:
    """Any other value is an error at the start: a typing error must not leave guards on, or off, unseen."""
    told(value)
    with pytest.raises(ConfigurationError, match="SEMEL_ENFORCEMENT"):
        entry(Shop(), Policy.ietf())


@pytest.mark.parametrize("value", ["", "enforce"])
def test_as_it_is_by_default(value: str, told: Settings) -> None:
    """Empty, or "enforce", changes nothing."""
    told(value)
    shop = Shop()
    asgi(shop, Policy.ietf())
    assert [shop.send().is_replay, shop.send().is_replay] == [False, True]


def order(connection: Any, amount: int) -> None:
    connection.execute(f"INSERT INTO orders VALUES ({amount:d})")


async def aorder(connection: Any, amount: int) -> None:
    done = connection.execute(f"INSERT INTO orders VALUES ({amount:d})")
    if hasattr(done, "__await__"):
        await done


@pytest.mark.parametrize("database", ["sqlite_url", "postgres_url"])
def test_phases_of_a_database(request: pytest.FixtureRequest, database: str, told: Settings) -> None:
    """With "off" what a phase writes is committed, in either colour, and the store needs no table of its own."""
    url: str = request.getfixturevalue(database)
    execute(url, "CREATE TABLE orders (amount integer)")
    told("off")

    @idempotent(key="amount", store=url, name="bill")
    def bill(amount: int) -> None:
        semel.current().phase("billed", order, amount)

    @idempotent(key="amount", store=url, name="abill")
    async def abill(amount: int) -> None:
        await semel.current().phase("billed", aorder, amount)

    bill(1)
    bill(1)
    asyncio.run(abill(2))
    rows = execute(url, "SELECT amount FROM orders ORDER BY amount")
    assert rows == [(1,), (1,), (2,)]


def execute(url: str, statement: str) -> list[Any]:
    """Run one statement, beside Semel."""
    if url.startswith("sqlite"):
        with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as file, file:
            return file.execute(statement).fetchall()
    with psycopg.connect(url, autocommit=True) as connection:
        done = connection.execute(statement.encode())
        return done.fetchall() if done.description else []
