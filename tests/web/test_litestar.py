"""Litestar behind the ASGI entry point: what it answers by itself, and what it does after an answer."""

from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import httpx
import pytest
from litestar import Litestar, Response, post
from litestar.background_tasks import BackgroundTask
from litestar.connection import ASGIConnection
from litestar.di import NamedDependency, Provide
from litestar.exceptions import HTTPException, NotAuthorizedException
from litestar.handlers import BaseRouteHandler
from litestar.middleware import AbstractAuthenticationMiddleware, AuthenticationResult, DefineMiddleware
from litestar.params import JSONBody
from litestar.response import ServerSentEvent

import semel
from semel import NoEffect, Policy
from semel.asgi import PER_ROUTE, IdempotencyMiddleware, Settled, claim
from semel.asgi.protocol import ASGIApp, ASGIScope
from semel.core.commands import Browse
from semel.stores.memory import AsyncMemoryStore, MemoryStore

KEY = {"Idempotency-Key": "key-1"}


class Shop:
    """A payment that does what the test says, guarded around the whole app."""

    def __init__(self, **policy: Any) -> None:
        self.memory = MemoryStore()
        self.runs: list[Any] = []
        self.is_banned = False
        self.behave: Callable[[], Any] = lambda: {"payment": len(self.runs)}

        def permission(_connection: ASGIConnection[Any, Any, Any, Any], _handler: BaseRouteHandler) -> None:
            if self.is_banned:
                raise NotAuthorizedException("You may not.")

        @post("/pay", guards=[permission])
        async def pay(data: JSONBody[dict[str, int]]) -> Any:
            self.runs.append((semel.current().key, data))
            return self.behave()

        self.litestar = Litestar([pay])
        self.app = IdempotencyMiddleware(
            cast("ASGIApp", self.litestar),
            store=AsyncMemoryStore(memory=self.memory),
            scope=lambda request: request.headers.get("x-account", "alice"),
            policy=Policy.ietf(**policy),
        )

    @property
    def is_empty(self) -> bool:
        return self.memory.perform(Browse(limit=1)) == ()

    async def pay(self, amount: Any = 5, path: str = "/pay", **headers: str) -> httpx.Response:
        transport = httpx.ASGITransport(cast("Any", self.app), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop.test") as client:
            return await client.post(path, json={"amount": amount}, headers=KEY | headers)


def seen(response: httpx.Response) -> tuple[int, bool]:
    """The status, and whether it is a replay."""
    return response.status_code, response.headers.get("idempotent-replayed") == "true"


async def test_a_retry_is_a_replay() -> None:
    """A handler runs once; its retry gets the same answer, and another body is refused."""
    shop = Shop()
    answers = [await shop.pay(amount) for amount in (5, 5, 6)]
    assert [seen(each) for each in answers] == [(201, False), (201, True), (422, False)]
    assert answers[0].json() == answers[1].json() == {"payment": 1}
    assert shop.runs == [("key-1", {"amount": 5})]


async def test_an_exception_is_kept() -> None:
    """An exception is answered by Litestar, with its own 500, and that answer is kept."""
    shop = Shop()

    def fail() -> None:
        raise RuntimeError("after the commit")

    shop.behave = fail
    first, again = [await shop.pay() for _ in range(2)]
    assert [seen(first), seen(again)] == [(500, False), (500, True)]
    assert first.json() == again.json() == {"status_code": 500, "detail": "Internal Server Error"}
    assert len(shop.runs) == 1


async def test_an_exception_frees_the_key_where_the_policy_says_so() -> None:
    """With server_errors="release" a retry runs again."""
    shop = Shop(server_errors="release")

    def fail() -> None:
        raise RuntimeError("oops")

    shop.behave = fail
    assert [seen(await shop.pay()) for _ in range(2)] == [(500, False), (500, False)]
    assert len(shop.runs) == 2


async def test_no_effect() -> None:
    """A handler that knows that nothing happened frees the key."""
    shop = Shop()

    def fail() -> None:
        raise NoEffect("The bank is closed.")

    shop.behave = fail
    first = await shop.pay()
    assert (first.status_code, first.json()["code"]) == (503, "no-effect")
    assert shop.is_empty


async def test_a_4xx_of_the_handler_is_kept() -> None:
    """An HTTPException of the handler is its answer."""
    shop = Shop()

    def refuse() -> None:
        raise HTTPException("Sold out.", status_code=409)

    shop.behave = refuse
    assert [seen(await shop.pay()) for _ in range(2)] == [(409, False), (409, True)]


async def test_background_tasks_run_once() -> None:
    """What is done after the answer is done once, and not for a replay."""
    shop = Shop()
    told: list[str] = []

    async def tell() -> None:
        told.append("told")

    shop.behave = lambda: Response({"paid": True}, background=BackgroundTask(tell))
    assert [seen(await shop.pay()) for _ in range(2)] == [(201, False), (201, True)]
    assert told == ["told"]


async def test_a_stream_of_events_leaves_a_tombstone() -> None:
    """An endless answer flows once, and its retry is told that the operation is done."""
    shop = Shop()

    async def numbers() -> AsyncIterator[str]:
        yield "1"

    @post("/events")
    async def events() -> ServerSentEvent:
        return ServerSentEvent(numbers())

    shop.litestar.register(events)
    first, again = [await shop.pay(path="/events") for _ in range(2)]
    assert first.text == "data: 1\r\n\r\n"
    assert (again.status_code, again.json()["code"]) == (409, "response-not-replayable")


async def test_a_guard_of_litestars_that_refuses() -> None:
    """A 401 of one of Litestar's guards is not kept; but a guard is not asked before a replay is given."""
    shop = Shop()
    shop.is_banned = True
    assert seen(await shop.pay()) == (401, False)
    assert shop.is_empty
    shop.is_banned = False
    assert seen(await shop.pay()) == (201, False)
    shop.is_banned = True
    assert seen(await shop.pay()) == (201, True)


@pytest.mark.parametrize("path, status", [("/nothing", 404), ("/pay", 400)])
async def test_what_litestar_answers_by_itself(path: str, status: int) -> None:
    """A path that is not there and a body that does not fit run no handler, and leave the key free."""
    shop = Shop()
    assert seen(await shop.pay("much", path)) == (status, False)
    assert (shop.runs, shop.is_empty) == ([], True)
    assert seen(await shop.pay()) == (201, False)


async def test_a_dependency_that_refuses() -> None:
    """A 4xx of one of Litestar's dependencies is not kept."""
    shop = Shop()

    async def refuse() -> None:
        raise HTTPException("Not today.", status_code=403)

    @post("/refused", dependencies={"checked": Provide(refuse)})
    async def pay(checked: NamedDependency[None]) -> None: ...

    shop.litestar.register(pay)
    assert seen(await shop.pay(path="/refused")) == (403, False)
    assert shop.is_empty


class Authentication(AbstractAuthenticationMiddleware):
    async def authenticate_request(self, connection: ASGIConnection[Any, Any, Any, Any]) -> AuthenticationResult:
        user = connection.headers.get("x-user")
        if user is None:
            raise NotAuthorizedException("Who are you?")
        return AuthenticationResult(user=user, auth=None)


async def test_as_a_guard_of_litestars() -> None:
    """As the last of a handler's guards, it asks for the key after the login and after every permission."""
    memory = MemoryStore()
    banned: set[str] = set()

    def permission(connection: ASGIConnection[Any, Any, Any, Any], _handler: BaseRouteHandler) -> None:
        if connection.user in banned:
            raise HTTPException("You may not.", status_code=403)

    async def idempotent(connection: ASGIConnection[Any, Any, Any, Any], _handler: BaseRouteHandler) -> None:
        try:
            await claim(cast("ASGIScope", connection.scope), connection.user)
        except Settled as settled:
            raise HTTPException(status_code=settled.answer.status) from None

    @post("/pay", guards=[permission, idempotent])
    async def pay(data: JSONBody[dict[str, int]]) -> str:
        return semel.current().scope

    app = IdempotencyMiddleware(
        cast("ASGIApp", Litestar([pay], middleware=[Authentication])),
        store=AsyncMemoryStore(memory=memory),
        scope=PER_ROUTE,
    )
    transport = httpx.ASGITransport(cast("Any", app), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://shop.test") as client:

        async def send(amount: Any = 5, **headers: str) -> tuple[int, bool]:
            return seen(await client.post("/pay", json={"amount": amount}, headers=KEY | headers))

        assert await send() == (401, False)
        assert await send("much", **{"X-User": "alice"}) == (400, False)
        assert memory.perform(Browse(limit=1)) == ()
        answers = [await send(**{"X-User": user}) for user in ("alice", "alice", "bob")]
        assert answers == [(201, False), (201, True), (201, False)]
        assert await send(6, **{"X-User": "alice"}) == (422, False)
        banned.add("alice")
        assert await send(**{"X-User": "alice"}) == (403, False)


async def test_among_litestars_own_middleware() -> None:
    """As a middleware of Litestar's, inside its authentication, the user that it found is the scope."""
    memory = MemoryStore()

    @post("/pay")
    async def pay() -> str:
        return semel.current().scope

    guard = DefineMiddleware(
        cast("Any", IdempotencyMiddleware),
        store=AsyncMemoryStore(memory=memory),
        scope=lambda request: str(request.raw["user"]),
    )
    app = Litestar([pay], middleware=[Authentication, guard])
    transport = httpx.ASGITransport(cast("Any", app))
    async with httpx.AsyncClient(transport=transport, base_url="http://shop.test") as client:
        answers = [await client.post("/pay", headers=KEY | {"X-User": user}) for user in ("alice", "alice", "bob")]
    assert [seen(each) for each in answers] == [(201, False), (201, True), (201, False)]
    assert [each.text for each in answers] == ["alice", "alice", "bob"]
