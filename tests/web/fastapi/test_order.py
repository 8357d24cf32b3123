"""Who is asked first: whatever else may refuse a request has done so before a replay is given."""

from collections.abc import AsyncIterator, Iterator
from typing import Annotated, Any

import pytest
from fastapi import APIRouter, Cookie, Depends, FastAPI, Header, HTTPException, Request
from fastapi.responses import StreamingResponse
from fastapi.sse import EventSourceResponse

import semel
from semel import SINGLE_TENANT, Operation, Policy
from semel.asgi import IdempotencyMiddleware
from semel.core.commands import Browse
from semel.errors import ConfigurationError
from semel.fastapi import Idempotent, install
from semel.stores.memory import AsyncMemoryStore, MemoryStore
from tests.docs.served import asgi
from tests.web.fastapi.shop import Payment, Shop, bearer, client_of, post, seen


@pytest.fixture
def shop() -> Shop:
    return Shop()


def on_the_route(shop: Shop) -> None:
    @shop.app.post("/pay", dependencies=[Depends(shop.guard), Depends(shop.may_pay)])
    async def pay(payment: Payment) -> None:
        shop.runs.append(payment.amount)


def on_the_route_with_the_guard_as_a_parameter(shop: Shop) -> None:
    @shop.app.post("/pay", dependencies=[Depends(shop.may_pay)])
    async def pay(_: Annotated[Operation, Depends(shop.guard)], payment: Payment) -> None:
        shop.runs.append(payment.amount)


def before_the_guard(shop: Shop) -> None:
    @shop.app.post("/pay")
    def pay(
        payment: Payment,
        allowed: Annotated[None, Depends(shop.may_pay)],
        operation: Annotated[Operation, Depends(shop.guard)],
    ) -> None:
        shop.runs.append(payment.amount)


def after_the_guard(shop: Shop) -> None:
    @shop.app.post("/pay")
    def pay(
        operation: Annotated[Operation, Depends(shop.guard)],
        payment: Payment,
        allowed: Annotated[None, Depends(shop.may_pay)],
    ) -> None:
        shop.runs.append(payment.amount)


def after_the_guard_of_the_router(shop: Shop) -> None:
    router = APIRouter(dependencies=[Depends(shop.guard)])

    @router.post("/pay")
    async def pay(payment: Payment, allowed: Annotated[None, Depends(shop.may_pay)]) -> None:
        shop.runs.append(payment.amount)

    shop.app.include_router(router)


def on_the_router(shop: Shop) -> None:
    router = APIRouter(dependencies=[Depends(shop.guard), Depends(shop.may_pay)])

    @router.post("/pay")
    async def pay(payment: Payment) -> None:
        shop.runs.append(payment.amount)

    shop.app.include_router(router)


def when_the_router_is_included(shop: Shop) -> None:
    inner, outer = APIRouter(), APIRouter(dependencies=[Depends(shop.guard)])

    @inner.post("/pay")
    async def pay(payment: Payment) -> None:
        shop.runs.append(payment.amount)

    outer.include_router(inner, dependencies=[Depends(shop.may_pay)])
    shop.app.include_router(outer)


def on_a_route_that_is_added_to_the_router_later(shop: Shop) -> None:
    router = APIRouter(dependencies=[Depends(shop.guard)])
    shop.app.include_router(router)

    @router.post("/pay")
    async def pay(payment: Payment, allowed: Annotated[None, Depends(shop.may_pay)]) -> None:
        shop.runs.append(payment.amount)


def in_a_mounted_app(shop: Shop) -> None:
    inner = FastAPI()

    @inner.post("/")
    async def pay(
        operation: Annotated[Operation, Depends(shop.guard)],
        payment: Payment,
        allowed: Annotated[None, Depends(shop.may_pay)],
    ) -> None:
        shop.runs.append(payment.amount)

    shop.app.mount("/pay", inner)


def behind_a_dependency_that_asks_for_the_guard(shop: Shop) -> None:
    def session(operation: Annotated[Operation, Depends(shop.guard)]) -> str:
        return operation.key

    @shop.app.post("/pay")
    def pay(
        session: Annotated[str, Depends(session)], payment: Payment, allowed: Annotated[None, Depends(shop.may_pay)]
    ) -> None:
        shop.runs.append(payment.amount)


def inside_a_dependency_that_asks_for_the_guard(shop: Shop) -> None:
    def session(
        operation: Annotated[Operation, Depends(shop.guard)], allowed: Annotated[None, Depends(shop.may_pay)]
    ) -> str:
        return operation.key

    @shop.app.post("/pay")
    def pay(session: Annotated[str, Depends(session)], payment: Payment) -> None:
        shop.runs.append(payment.amount)


def inside_the_second_of_two_dependencies_that_ask_for_the_guard(shop: Shop) -> None:
    def session(operation: Annotated[Operation, Depends(shop.guard)]) -> str:
        return operation.key

    def audit(
        operation: Annotated[Operation, Depends(shop.guard)], allowed: Annotated[None, Depends(shop.may_pay)]
    ) -> str:
        return operation.key

    @shop.app.post("/pay")
    def pay(session: Annotated[str, Depends(session)], audit: Annotated[str, Depends(audit)], payment: Payment) -> None:
        shop.runs.append(payment.amount)


POSITIONS = (
    on_the_route,
    on_the_route_with_the_guard_as_a_parameter,
    before_the_guard,
    after_the_guard,
    after_the_guard_of_the_router,
    on_the_router,
    when_the_router_is_included,
    on_a_route_that_is_added_to_the_router_later,
    in_a_mounted_app,
    behind_a_dependency_that_asks_for_the_guard,
    inside_a_dependency_that_asks_for_the_guard,
    inside_the_second_of_two_dependencies_that_ask_for_the_guard,
)


@pytest.mark.parametrize("written", POSITIONS, ids=lambda each: each.__name__)
async def test_a_permission_is_asked_before_a_replay_is_given(shop: Shop, written: Any) -> None:
    """Whoever loses a permission between two tries gets 403 and no replay, wherever the permission is written."""
    written(shop)
    path = "/pay/" if written is in_a_mounted_app else "/pay"
    assert [seen(await post(shop.app, path)) for _ in range(2)] == [(200, False), (200, True)]
    shop.banned.add("alice")
    refused = await post(shop.app, path)
    assert (seen(refused), refused.json()) == ((403, False), {"detail": "You may not."})
    del shop.tokens["token-1"]
    assert seen(await post(shop.app, path)) == (401, False)
    # The refusals have changed nothing.
    shop.banned.clear()
    assert seen(await post(shop.app, path, headers=bearer("token-2"))) == (200, True)
    assert shop.runs == [5]


@pytest.mark.parametrize("written", POSITIONS, ids=lambda each: each.__name__)
async def test_a_refused_permission_claims_nothing(shop: Shop, written: Any) -> None:
    """A 403 of a dependency is not kept: with the permission the same key may be used."""
    written(shop)
    path = "/pay/" if written is in_a_mounted_app else "/pay"
    shop.banned.add("alice")
    assert seen(await post(shop.app, path)) == (403, False)
    assert shop.is_empty
    shop.banned.clear()
    assert seen(await post(shop.app, path)) == (200, False)


async def test_a_route_that_is_added_while_the_app_runs(shop: Shop) -> None:
    """A route that is added after the first request is seen when it is there."""
    shop.pay("/other")
    assert seen(await post(shop.app, "/other", headers={"Idempotency-Key": "other"})) == (201, False)
    after_the_guard(shop)
    assert seen(await post(shop.app)) == (200, False)
    shop.banned.add("alice")
    assert seen(await post(shop.app)) == (403, False)


async def test_an_app_that_can_not_be_seen_is_refused(shop: Shop) -> None:
    """A mounted app that is wrapped in something else hides its routes: an error, and no replay out of order."""
    inner = FastAPI()

    @inner.post("/pay")
    async def pay(operation: Annotated[Operation, Depends(shop.guard)]) -> None:
        shop.runs.append(operation.key)

    async def wrapped(scope: Any, receive: Any, send: Any) -> None:
        await inner(scope, receive, send)

    shop.app.mount("/v1", wrapped)
    async with client_of(shop.app) as client:
        client._transport.raise_app_exceptions = True  # type: ignore[attr-defined]
        with pytest.raises(ConfigurationError, match="its own install"):
            await client.post("/v1/pay", headers={"Idempotency-Key": "key-1"})
    assert shop.runs == []
    inner.middleware_stack = None
    install(inner, store=AsyncMemoryStore(memory=shop.memory))
    assert [seen(await post(shop.app, "/v1/pay")) for _ in range(2)] == [(200, False), (200, True)]


@pytest.mark.parametrize("kind", ["header", "cookie", "own header"])
async def test_a_missing_header_is_refused_before_a_replay_is_given(shop: Shop, kind: str) -> None:
    """A dependency that asks for a header or cookie refuses the request without it, replay or not."""

    def by_header(x_token: Annotated[str, Header()]) -> None: ...

    def by_cookie(token: Annotated[str, Cookie()]) -> None: ...

    guard = Idempotent(scope=SINGLE_TENANT)
    if kind == "own header":

        @shop.app.post("/pay")
        async def pay_with_header(_: Annotated[Operation, Depends(guard)], x_token: Annotated[str, Header()]) -> None:
            shop.runs.append(1)

    else:

        @shop.app.post("/pay", dependencies=[Depends(by_header if kind == "header" else by_cookie)])
        async def pay(_: Annotated[Operation, Depends(guard)]) -> None:
            shop.runs.append(1)

    given = {"Cookie": "token=t"} if kind == "cookie" else {"X-Token": "t"}
    assert [seen(await post(shop.app, headers=given)) for _ in range(2)] == [(200, False), (200, True)]
    assert seen(await post(shop.app)) == (422, False)
    assert shop.runs == [1]


async def test_a_dependency_without_cache_runs_once(shop: Shop) -> None:
    """Being put in order calls no dependency twice, not even one that is never cached."""
    calls: list[str] = []

    def counted(x_token: Annotated[str, Header()]) -> None:
        calls.append(x_token)

    @shop.app.post("/pay", dependencies=[Depends(counted, use_cache=False)])
    async def pay(_: Annotated[Operation, Depends(shop.guard)]) -> None: ...

    assert seen(await post(shop.app, headers={"X-Token": "t"})) == (200, False)
    assert calls == ["t"]


# In an app that is guarded as a whole


async def test_a_dependencys_refusal_is_not_kept_by_a_middleware_either() -> None:
    """A 4xx that a dependency raises frees the key, in an app that is guarded as a whole; the route's own is kept."""
    memory = MemoryStore()
    app = FastAPI()
    app.add_middleware(
        IdempotencyMiddleware, store=AsyncMemoryStore(memory=memory), scope=SINGLE_TENANT, policy=Policy.ietf()
    )

    def check(x_kind: Annotated[str, Header()] = "") -> None:
        if x_kind == "dependency":
            raise HTTPException(403)

    @app.post("/pay", dependencies=[Depends(check)])
    def pay(request: Request) -> None:
        raise HTTPException(403)

    assert seen(await post(app, headers={"X-Kind": "dependency"})) == (403, False)
    assert memory.perform(Browse(limit=1)) == ()
    assert [seen(await post(app)) for _ in range(2)] == [(403, False), (403, True)]


# What is wrong at the start


async def start(app: FastAPI) -> None:
    async with asgi(app):
        pass


async def test_a_get_route_can_not_be_guarded(shop: Shop) -> None:
    """A guard on a route that is never guarded is an error when the app starts."""

    @shop.app.get("/pay")
    def payments(_: Annotated[Operation, Depends(shop.guard)]) -> None: ...

    with pytest.raises(ConfigurationError, match=r"GET /pay: its policy guards PATCH and POST only"):
        await start(shop.app)
    # A server that does not speak of its start says it with every request.
    assert (await post(shop.app)).status_code == 500


async def test_a_method_that_the_policy_leaves_out_can_not_be_guarded(shop: Shop) -> None:
    """A guard whose policy does not name the route's method would do nothing: an error when the app starts."""

    @shop.app.delete("/pay")
    def cancel(_: Annotated[Operation, Depends(shop.guard)]) -> None: ...

    with pytest.raises(ConfigurationError, match=r"DELETE /pay"):
        await start(shop.app)


class Events(StreamingResponse):
    media_type = "text/event-stream"


@pytest.mark.parametrize("response_class", [Events, EventSourceResponse])
async def test_an_endless_stream_can_not_be_guarded(shop: Shop, response_class: Any) -> None:
    """A guarded route that says it answers with events is an error when the app starts."""

    @shop.app.post("/events", response_class=response_class, dependencies=[Depends(shop.guard)])
    def events() -> None: ...

    with pytest.raises(ConfigurationError, match=r"POST /events: it answers with an endless stream"):
        await start(shop.app)


async def test_an_endless_stream_that_is_not_declared_leaves_a_tombstone(shop: Shop) -> None:
    """A route that streams events without saying so beforehand is run once, and its retry is told so."""

    async def events() -> AsyncIterator[str]:
        yield "data: 1\n\n"

    @shop.app.post("/pay")
    def pay(_: Annotated[Operation, Depends(shop.guard)]) -> StreamingResponse:
        shop.runs.append(1)
        return StreamingResponse(events(), media_type="text/event-stream")

    first, again = [await post(shop.app) for _ in range(2)]
    assert (first.status_code, first.text) == (200, "data: 1\n\n")
    assert (again.status_code, again.json()["code"]) == (409, "response-not-replayable")
    assert shop.runs == [1]


async def test_two_guards_on_one_route(shop: Shop) -> None:
    """A route is guarded once: a second guard, of its router perhaps, is an error when the app starts."""
    router = APIRouter(dependencies=[Depends(shop.guard)])

    @router.post("/pay")
    def pay(_: Annotated[Operation, Depends(Idempotent(scope=SINGLE_TENANT))]) -> None: ...

    shop.app.include_router(router)
    with pytest.raises(ConfigurationError, match=r"POST /pay: a route is guarded once, and this one has 2"):
        await start(shop.app)


async def test_a_start_that_is_right(shop: Shop) -> None:
    """An app whose guards are right starts, serves and stops."""
    shop.pay()
    async with asgi(shop.app) as client:
        paid = await client.post(
            "/pay", json={"amount": 5}, headers={"Idempotency-Key": "key-1", "Authorization": "Bearer token-1"}
        )
    assert seen(paid) == (201, False)


async def test_a_dependency_that_yields_is_closed_after_a_replay(shop: Shop) -> None:
    """A dependency that yields ends for a replay as it does for any answer."""
    endings: list[str] = []

    def session() -> Iterator[None]:
        try:
            yield
        except HTTPException:
            endings.append("rolled back")
            raise
        endings.append("committed")

    @shop.app.post("/pay")
    def pay(_: Annotated[Operation, Depends(shop.guard)], session: Annotated[None, Depends(session)]) -> str:
        return semel.current().key

    assert [seen(await post(shop.app)) for _ in range(2)] == [(200, False), (200, True)]
    assert endings == ["committed", "rolled back"]
