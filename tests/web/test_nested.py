"""A guard inside another guard's operation: one request is claimed once, whichever of them sees it first."""

import asyncio
import threading
from collections.abc import Callable, Iterable
from typing import Any
from wsgiref.types import StartResponse, WSGIEnvironment

import flask
import pytest
from asgiref.wsgi import WsgiToAsgi
from starlette.applications import Starlette
from starlette.requests import Request as StarletteRequest
from starlette.responses import JSONResponse
from starlette.routing import Mount, Route

import semel
import semel.asgi
import semel.flask
import semel.stores
import semel.wsgi
from semel import Policy
from semel.errors import NotGuarded, StepUnfinished
from semel.functions import idempotent
from semel.guard.running import callers_gone
from tests.web.harness import HANG_SECONDS, AsgiClient, Request, Response, asgi_scope, call_asgi, call_wsgi

SEND = Request(
    target="/pay",
    lines=(("Idempotency-Key", b"key-1"), ("Content-Type", b"application/json"), ("Content-Length", b"13")),
    body=b'{"amount": 5}',
)
Call = Callable[[Request], Response]


class Shop:
    """A handler in either colour, which says what it was sent."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.attempts: list[int] = []

    def run(self, body: bytes) -> bytes:
        self.bodies.append(body)
        self.attempts.append(semel.current().attempt)
        return b"%d" % len(self.bodies)

    def wsgi(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        answer = self.run(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])))
        start_response("201 Created", [("Content-Type", "text/plain")])
        return [answer]

    async def asgi(self, request: StarletteRequest) -> JSONResponse:
        return JSONResponse(self.run(await request.body()).decode(), 201)

    def starlette(self) -> Starlette:
        return Starlette(routes=[Route("/pay", self.asgi, methods=["POST"])])


def asgi(app: Any, url: str, **settings: Any) -> Any:
    return semel.asgi.IdempotencyMiddleware(app, store=url, scope=semel.SINGLE_TENANT, **settings)


def wsgi(app: Any, url: str, **settings: Any) -> Any:
    return semel.wsgi.IdempotencyMiddleware(app, store=url, scope=semel.SINGLE_TENANT, **settings)


def middleware_twice(shop: Shop, url: str) -> Any:
    """A gateway that guards everything, and a service that does so, too."""
    return asgi(asgi(shop.starlette(), url), url)


def mounted(shop: Shop, url: str) -> Any:
    return asgi(Starlette(routes=[Mount("/", asgi(shop.starlette(), url))]), url)


def atomic_twice(shop: Shop, url: str) -> Any:
    policy = Policy.ietf(mode="atomic")
    return asgi(asgi(shop.starlette(), url, policy=policy), url, policy=policy)


def wsgi_inside_asgi(shop: Shop, url: str) -> Any:
    return asgi(WsgiToAsgi(wsgi(shop.wsgi, url)), url)  # type: ignore[no-untyped-call]  # asgiref has no types


def wsgi_twice(shop: Shop, url: str) -> Any:
    return wsgi(wsgi(shop.wsgi, url), url)


def around_flask(shop: Shop, url: str) -> Any:
    app = flask.Flask("shop")
    semel.flask.Semel(app, store=url, scope=semel.SINGLE_TENANT)

    @app.post("/pay")
    @semel.flask.idempotent
    def pay() -> tuple[bytes, int]:
        return shop.run(flask.request.get_data()), 201

    return wsgi(app, url)


@pytest.mark.parametrize(
    "build",
    [middleware_twice, mounted, atomic_twice, wsgi_inside_asgi, wsgi_twice, around_flask],
    ids=lambda each: each.__name__,
)
def test_inner_guard_stands_aside(build: Callable[[Shop, str], Any], sqlite_url: str) -> None:
    """Two guards around one handler, on one table, are one operation: it runs once, and its retry is a replay."""
    shop = Shop()
    app = build(shop, sqlite_url)
    first, again = send_all(app, 2)
    assert first.status == 201
    assert (again.status, again.is_replay, again.body) == (201, True, first.body)
    assert shop.bodies == [SEND.body]
    assert shop.attempts == [1]


@pytest.mark.parametrize("policy", [Policy.ietf(), Policy.ietf(mode="atomic")], ids=["guard", "atomic"])
async def test_guard_of_another_store_guards(policy: Policy, sqlite_url: str) -> None:
    """A service with a store of its own, called in the same process with the key passed on, runs once by its own key.

    The gateway may call it again, after a timeout as after a crash: it is not part of the gateway's record.
    """
    shop = Shop()
    service = asgi(shop.starlette(), sqlite_url, policy=policy)
    answers: list[Response] = []

    async def gateway(_request: StarletteRequest) -> JSONResponse:
        answers.extend([await call_asgi(service, SEND), await call_asgi(service, SEND)])
        return JSONResponse(answers[0].json(), 201)

    app = asgi(Starlette(routes=[Route("/pay", gateway, methods=["POST"])]), "memory://")
    try:
        assert (await call_asgi(app, SEND)).json() == "1"
    finally:
        await service.store.close()
    assert [(each.status, each.is_replay) for each in answers] == [(201, False), (201, True)]
    assert len(shop.bodies) == 1


def test_atomic_inside_a_guard_is_refused(sqlite_url: str) -> None:
    """An atomic guard has no transaction to give inside of a guard that is not: that is said, and nothing runs."""
    shop = Shop()
    (answer,) = send_all(asgi(asgi(shop.starlette(), sqlite_url, policy=Policy.ietf(mode="atomic")), sqlite_url), 1)
    assert answer.status == 500
    assert "atomic" in str(answer.error)
    assert shop.bodies == []


def test_function_with_a_key_of_its_own_is_guarded_inside_a_request(sqlite_url: str) -> None:
    """A guarded function inside of a guarded request has its own key: two requests that call it run it once."""
    charged: list[str] = []

    @idempotent(key="order", store=sqlite_url, name="charge")
    def charge(order: str) -> int:
        charged.append(order)
        return len(charged)

    def app(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        answer = charge("order-7")
        start_response("201 Created", [("Content-Type", "text/plain")])
        return [b"%d" % answer]

    guarded = wsgi(app, sqlite_url)
    one = call_wsgi(guarded, SEND)
    other = call_wsgi(guarded, Request(target="/pay", lines=(("Idempotency-Key", b"key-2"),)))
    assert (one.body, other.body, other.is_replay) == (b"1", b"1", False)
    assert charged == ["order-7"]


def test_function_that_another_request_runs_is_later(sqlite_url: str) -> None:
    """A handler whose guarded function is busy in another request answers 409 with Retry-After, and its key is free."""
    begun, may_end = threading.Event(), threading.Event()

    @idempotent(key="order", store=sqlite_url, name="charge")
    def charge(order: str) -> str:
        begun.set()
        assert may_end.wait(HANG_SECONDS)
        return order

    def app(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        answer = charge("order-7").encode()
        start_response("201 Created", [("Content-Type", "text/plain")])
        return [answer]

    guarded = wsgi(app, sqlite_url)
    other = Request(target="/pay", lines=(("Idempotency-Key", b"key-2"),))
    first = threading.Thread(target=call_wsgi, args=(guarded, SEND))
    first.start()
    try:
        assert begun.wait(HANG_SECONDS)
        busy = call_wsgi(guarded, other)
        assert (busy.status, busy.code) == (409, "idempotency-key-in-progress")
        assert int(busy.header("retry-after") or 0) >= 1
    finally:
        may_end.set()
        first.join()
    assert (call_wsgi(guarded, other).status, call_wsgi(guarded, other).is_replay) == (201, True)


def send_all(app: Any, times: int) -> list[Response]:
    if isinstance(app, semel.wsgi.IdempotencyMiddleware):
        try:
            return [call_wsgi(app, SEND) for _ in range(times)]
        finally:
            app.guard.leases.close()
            app.store.close()

    async def send() -> list[Response]:
        try:
            return [await asyncio.wait_for(call_asgi(app, SEND), HANG_SECONDS) for _ in range(times)]
        finally:
            await app.store.close()

    return asyncio.run(send())


async def test_operation_that_has_ended_is_not_that_of_the_next_request() -> None:
    """A server may begin a request in the context of the one before: pipelined, it comes in while that is answered."""
    seen: list[str | None] = []

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        try:
            seen.append(semel.current().key)
        except NotGuarded:
            seen.append(None)
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    guarded = asgi(app, "memory://", paths="/pay")

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def serve(*requests: tuple[str, list[tuple[bytes, bytes]]]) -> None:
        (path, headers), *further = requests
        sent: list[asyncio.Task[None]] = []

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body" and further:
                sent.append(asyncio.create_task(serve(*further)))  # As uvicorn does.

        scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b""}
        await guarded(scope, receive, send)
        await asyncio.gather(*sent)

    await serve(("/pay", [(b"idempotency-key", b"key-1")]), ("/pay", []), ("/other", []))
    assert seen == ["key-1", None, None]


@pytest.mark.parametrize("outside", [Policy(enforcement="off"), Policy(header="Other-Key")], ids=["off", "keyless"])
async def test_cancelled_behind_a_guard_that_stands_aside(outside: Policy) -> None:
    """A guard that lets a request pass has no part in it: the handler of the guard inside ends, and is stored."""
    begun, go = asyncio.Event(), asyncio.Event()
    runs = 0

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        nonlocal runs
        runs += 1
        begun.set()
        await go.wait()
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": b"made"})

    inside = asgi(app, "memory://")
    guarded = asgi(inside, "memory://", policy=outside)
    client = AsgiClient(SEND)
    serving = asyncio.ensure_future(guarded(asgi_scope(SEND), client.receive, client.send))
    await asyncio.wait_for(begun.wait(), HANG_SECONDS)
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
    go.set()
    await callers_gone()
    again = await call_asgi(guarded, SEND)
    assert (again.status, again.body, again.is_replay, runs) == (201, b"made", True, 1)


async def test_cancelled_in_an_effect_that_is_guarded_itself() -> None:
    """A step that is cancelled ends; the guarded function that it waits for goes on behind it, and is stored."""
    begun, go = asyncio.Event(), asyncio.Event()
    store = semel.stores.async_store("memory://")
    runs: list[str] = []

    @idempotent(key="order", store=store, name="charge")
    async def charge(order: str) -> str:
        runs.append(order)
        begun.set()
        await go.wait()
        return "charged"

    async def effect(idempotency_key: str) -> str:
        return await charge("order-1")

    @idempotent(key="order", store=store, name="pay")
    async def pay(order: str) -> None:
        taking = asyncio.ensure_future(semel.current().effect("charge", effect))
        await begun.wait()
        taking.cancel()
        await asyncio.wait([taking])

    with pytest.raises(StepUnfinished):
        await asyncio.wait_for(pay("order-1"), HANG_SECONDS)
    go.set()
    await callers_gone()
    assert await charge("order-1") == "charged"
    assert runs == ["order-1"]
