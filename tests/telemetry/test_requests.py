"""One event for each guarded request that has ended, through every door."""

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import httpx
import pytest
from fastapi import APIRouter, Depends, FastAPI
from flask import Flask
from litestar import Litestar, post
from litestar.params import FromPath
from starlette.testclient import TestClient

from semel import SINGLE_TENANT, Policy
from semel.asgi import IdempotencyMiddleware
from semel.core.commands import Claim
from semel.core.events import MessageEnded, RequestEnded, WaitBegan, WaitEnded
from semel.core.key import Key
from semel.errors import KeyReused, MessageDiffers, NoEffect, StoreUnavailable
from semel.fastapi import Idempotent, install
from semel.flask import Semel, idempotent
from semel.functions import idempotent as once
from semel.guard.endpoints import OTHER, Bounded, Templates
from semel.inbox import Inbox
from semel.stores.memory import AsyncMemoryStore
from semel.wsgi import IdempotencyMiddleware as WSGIMiddleware
from tests.telemetry.conftest import Seen

KEY = {"Idempotency-Key": "order-17"}
ONE: dict[str, Any] = {"content": b"{}", "headers": {**KEY, "content-type": "application/json"}}


def fastapi_app() -> FastAPI:
    app = FastAPI()

    @app.post("/orders/{number}")
    def order(number: int) -> int:
        return number

    return app


def guarded(policy: Policy | None = None, app: Any = None, **more: Any) -> TestClient:
    return TestClient(
        IdempotencyMiddleware(app or fastapi_app(), store="memory://", scope=SINGLE_TENANT, policy=policy, **more)
    )


def only(seen: Seen) -> RequestEnded:
    (event,) = seen.requests
    return event


def test_a_first_execution_and_its_parts(seen: Seen) -> None:
    """Of a first execution it is told how long claim, handler and store took, one after the other."""
    guarded().post("/orders/3", **ONE)
    event = only(seen)
    assert (event.outcome, event.endpoint, event.door) == ("ran", "POST /orders/{number}", "asgi")
    assert (event.key, event.attempt) == (Key("order-17").short(), 1)
    assert event.claim is not None
    assert event.handler is not None
    assert event.store is not None
    starts = [event.claim.after, event.handler.after, event.store.after]
    assert starts == sorted(starts)
    assert 0 < event.claim.seconds + event.handler.seconds + event.store.seconds <= event.seconds


def test_a_replay_has_no_handler(seen: Seen) -> None:
    """A replay is told with the endpoint of the first execution, although it never came to a route."""
    client = guarded()
    for _ in range(2):
        client.post("/orders/3", **ONE)
    replay = seen.requests[1]
    assert (replay.outcome, replay.endpoint, replay.attempt) == ("replayed", "POST /orders/{number}", None)
    assert replay.handler is replay.store is None


@pytest.mark.parametrize(
    "policy, request_, outcome",
    [
        (Policy.ietf(), {}, "passed_on"),
        (Policy.ietf(required=True), {}, "missing"),
        (Policy.ietf(), {"headers": {"Idempotency-Key": ""}}, "malformed"),
        (Policy.ietf(max_request_body=3), {"headers": KEY, "content": b"long"}, "too_large"),
        (Policy.ietf(max_response_body=0), ONE, "not_kept"),
        (Policy.ietf(enforcement="report"), ONE, "reported"),
    ],
)
def test_outcomes(policy: Policy, request_: dict[str, Any], outcome: str, seen: Seen) -> None:
    """Each way in which a request can end has a word of its own."""
    guarded(policy).post("/orders/3", **request_)
    assert seen.outcomes == [outcome]


def test_an_answer_that_cant_be_replayed(seen: Seen) -> None:
    """A duplicate that gets a refusal in place of the first answer is not counted as a replay."""
    client = guarded(Policy.ietf(max_response_body=0))
    for _ in range(2):
        client.post("/orders/3", **ONE)
    assert seen.outcomes == ["not_kept", "not_replayable"]


def test_a_key_used_for_another_request(seen: Seen) -> None:
    """A key that was used for another request is a mismatch."""
    client = guarded()
    client.post("/orders/3", **ONE)
    client.post("/orders/4", **ONE)
    assert seen.outcomes == ["ran", "mismatch"]


def test_an_answer_that_is_not_kept_frees_the_key(seen: Seen) -> None:
    """A handler that says that it had no effect leaves its key free."""
    app = FastAPI()

    @app.post("/pay")
    def pay() -> None:
        raise NoEffect("card declined")

    guarded(app=app).post("/pay", **ONE)
    assert seen.outcomes == ["freed"]


class Down(AsyncMemoryStore):
    def perform(self, command: Any) -> Any:
        if isinstance(command, Claim):
            raise StoreUnavailable("no route to host")
        return super().perform(command)


def test_a_store_that_fails(seen: Seen) -> None:
    """A request that is refused because the store failed is told as that."""
    client = TestClient(IdempotencyMiddleware(fastapi_app(), store=Down(), scope=SINGLE_TENANT))
    assert client.post("/orders/3", **ONE).status_code == 503
    assert seen.outcomes == ["store_failed"]


async def test_duplicates_that_conflict_and_wait(seen: Seen, used: Callable[[Any], Any]) -> None:
    """A duplicate is a conflict, or, where it waits, is told when it begins to wait, when it ends, and how."""
    entered, leave, waiting = asyncio.Event(), asyncio.Event(), asyncio.Event()
    used(lambda event: waiting.set() if isinstance(event, WaitBegan) else None)
    app = FastAPI()

    @app.post("/slow")
    async def slow() -> str:
        entered.set()
        await leave.wait()
        return "done"

    store = AsyncMemoryStore()
    impatient = IdempotencyMiddleware(app, store=store, scope=SINGLE_TENANT)
    patient = IdempotencyMiddleware(
        app, store=store, scope=SINGLE_TENANT, policy=Policy.ietf(in_progress="wait", wait=timedelta(seconds=20))
    )
    async with (
        httpx.AsyncClient(transport=httpx.ASGITransport(impatient), base_url="http://test") as one,
        httpx.AsyncClient(transport=httpx.ASGITransport(patient), base_url="http://test") as two,
    ):
        first = asyncio.create_task(one.post("/slow", **ONE))
        await entered.wait()
        assert (await one.post("/slow", **ONE)).status_code == 409
        second = asyncio.create_task(two.post("/slow", **ONE))
        await waiting.wait()
        leave.set()
        assert (await first).text == (await second).text == '"done"'
    assert sorted(seen.outcomes) == ["conflict", "ran", "waited"]
    assert seen.count(WaitBegan()) == seen.count(WaitEnded()) > 0


def test_fastapi_by_route(seen: Seen) -> None:
    """A route that guards itself is told by its template, with the prefix of its router."""
    app, router = FastAPI(), APIRouter(prefix="/v1")

    @router.post("/rides/{number}", dependencies=[Depends(Idempotent(scope=lambda: "acme"))])
    def ride(number: int) -> int:
        return number

    install(app, store="memory://")
    app.include_router(router, prefix="/api")
    client = TestClient(app)
    for _ in range(2):
        client.post("/api/v1/rides/7", **ONE)
    assert seen.outcomes == ["ran", "replayed"]
    assert {(each.endpoint, each.door) for each in seen.requests} == {("POST /api/v1/rides/{number}", "fastapi")}


def test_litestar(seen: Seen) -> None:
    """Litestar's template is known, too."""

    @post("/orders/{number:int}", sync_to_thread=False)
    def order(number: FromPath[int]) -> int:
        return number

    guarded(app=Litestar([order])).post("/orders/3", **ONE)
    assert only(seen).endpoint == "POST /orders/{number}"


def flask_app() -> Flask:
    app = Flask("shop")

    @app.post("/orders/<int:number>")
    def order(number: int) -> str:
        return str(number)

    return app


def test_flask(seen: Seen) -> None:
    """A guarded view of Flask's is told by its rule; in the WSGI middleware, a request by the pattern of its path."""
    app = flask_app()
    Semel(app, store="memory://", scope=SINGLE_TENANT)
    app.add_url_rule("/pay/<who>", view_func=idempotent(lambda who: who), methods=["POST"], endpoint="pay")
    for _ in range(2):
        app.test_client().post("/pay/ann", headers=KEY)
    whole = flask_app()
    whole.wsgi_app = WSGIMiddleware(whole.wsgi_app, store="memory://", scope=SINGLE_TENANT, paths=["/orders/*"])  # type: ignore[method-assign]
    for _ in range(2):
        whole.test_client().post("/orders/3", headers=KEY)
    assert seen.outcomes == ["ran", "replayed"] * 2
    assert [(each.endpoint, each.door) for each in seen.requests] == [
        *[("POST /pay/<who>", "flask")] * 2,
        *[("POST /orders/*", "wsgi")] * 2,
    ]


def test_a_path_is_never_an_endpoint(seen: Seen) -> None:
    """Without a template the endpoint is the pattern by which the path is guarded, or ``other``: never the path."""

    async def bare(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    guarded(app=bare).post("/secret-4711", **ONE)
    guarded(app=bare, paths=["/pay/*"]).post("/pay/secret-4711", **ONE)
    assert [each.endpoint for each in seen.requests] == [OTHER, "POST /pay/*"]


def test_functions(seen: Seen) -> None:
    """A guarded function is told by its name, and a refusal that it raises by its word."""

    @once(key="order", scope=SINGLE_TENANT, store="memory://", name="charge")
    def charge(order: str, amount: int) -> int:
        return amount

    assert charge("17", 5) == charge("17", 5) == 5
    with pytest.raises(KeyReused):
        charge("17", 6)
    assert seen.outcomes == ["ran", "replayed", "mismatch"]
    assert {(each.endpoint, each.door) for each in seen.requests} == {("charge", "function")}


def test_inbox(sqlite_url: str, seen: Seen) -> None:
    """A delivery is told as what became of it."""
    inbox = Inbox(sqlite_url, consumer="billing", max_attempts=1)
    inbox.store.migrate()

    def fail(connection: Any) -> None:
        raise RuntimeError("no ink")

    try:
        inbox.receive("1", lambda connection: None, payload=b"a")
        inbox.receive("1", lambda connection: None, payload=b"a")
        with pytest.raises(MessageDiffers):
            inbox.receive("1", lambda connection: None, payload=b"b")
        inbox.receive("2", fail, payload=b"a")
    finally:
        inbox.close()
    assert [each.outcome for each in seen if isinstance(each, MessageEnded)] == ["ran", "duplicate", "reused", "parked"]


def test_endpoints_are_bounded() -> None:
    """Only so many endpoints have a name of their own: labels must not grow with what clients send."""
    endpoints = Bounded(2)
    assert [endpoints.name(each) for each in ("a", "b", "c", "a", None)] == ["a", "b", OTHER, "a", OTHER]


def test_templates() -> None:
    """A path is compared with the templates that were seen, whatever the framework writes them like."""
    templates = Templates()
    assert templates.find("/orders/3") is None
    expected = {
        "/orders/3": "/orders/{id}",
        "/api/orders/3": "/orders/{id}",
        "/orders/3/4": None,
        "/orders/": None,
        "/ordersx3": None,
        "/files/a/b": "/files/{name:path}",
        "/raw/a/b/c/raw": "/raw/{name:path}/raw",
        "/raw/raw": None,
        "/pay/7/now": "/pay/<int:who>/now",
        "/report/may.2026.pdf": "/report/{month}.{kind}",
        "/report/.pdf": None,
        "/items/7/": "items/<int:item>/",
    }
    for template in filter(None, expected.values()):
        templates.learn(template)
    for _ in range(2):  # then from memory
        assert {path: templates.find(path) for path in expected} == expected


@pytest.mark.parametrize("path", ["/" * 20_000 + "x", "/a" * 60, "/" + "-" * 1000])
def test_a_path_that_fits_in_many_ways(path: str) -> None:
    """A path is compared with templates in a few steps, however long it is: trying all ways took minutes."""
    templates = Templates()
    for template in ("/{a:path}/{b:path}/{c:path}/{d:path}/{e:path}/{f:path}/raw", "/{a}-{b}-{c}-{d}-{e}-{f}x"):
        templates.learn(template)
    assert templates.find(path) is None


def test_an_endpoint_that_is_not_known(seen: Seen, caplog: pytest.LogCaptureFixture) -> None:
    """A framework that fails to say which route it chose fails no request: it is told as ``other``."""

    class Odd:
        @property
        def path(self) -> str:
            raise RuntimeError("no path today")

    async def odd(scope: Any, receive: Any, send: Any) -> None:
        scope["route"] = Odd()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    assert guarded(app=odd).post("/pay", **ONE).status_code == 200
    assert only(seen).endpoint == OTHER
    assert "not known" in caplog.text
