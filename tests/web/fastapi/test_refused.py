"""What FastAPI refuses on the way to a handler is not kept, whatever middleware is around the route."""

from collections.abc import Awaitable, Callable, Iterator
from typing import Annotated, Any

import httpx
import pytest
from fastapi import Depends, FastAPI, HTTPException, Request, Response
from pydantic import BaseModel

import semel
from semel.asgi import IdempotencyMiddleware
from semel.fastapi import Idempotent, install
from semel.stores.memory import AsyncMemoryStore
from tests.web.fastapi.shop import post, seen

Next = Callable[[Request], Awaitable[Response]]


class Payment(BaseModel):
    amount: int


class Shop:
    """An app that a middleware guards as a whole, with a middleware of the usual kind between it and the routes."""

    def __init__(self, permission: Any = None) -> None:
        self.may_pay = False
        self.runs = 0
        self.dependencies: list[Any] = []
        self.app = FastAPI()

        @self.app.middleware("http")
        async def timed(request: Request, call_next: Next) -> Response:
            response = await call_next(request)
            response.headers["x-time"] = "0.1"
            return response

        store = AsyncMemoryStore()
        self.app.add_middleware(IdempotencyMiddleware, store=store, scope=semel.SINGLE_TENANT)
        self.app.post("/pay", status_code=201, dependencies=[Depends(permission or self.allowed)])(self.pay)

    def allowed(self) -> None:
        if not self.may_pay:
            raise HTTPException(403, "Not you.")

    async def pay(self, payment: Payment) -> dict[str, int]:
        self.runs += 1
        if payment.amount > 100:
            raise HTTPException(403, "Not so much.")
        return {"payment": self.runs}


class Guarded(Shop):
    """An app whose routes are guarded by themselves."""

    def __init__(self) -> None:
        self.runs = 0
        self.app = FastAPI()
        self.dependencies = [Depends(Idempotent(scope=semel.SINGLE_TENANT))]
        install(self.app, store=AsyncMemoryStore())


def plain(shop: Shop) -> Any:
    return shop.allowed


def awaited(shop: Shop) -> Any:
    async def allowed() -> None:
        shop.allowed()

    return allowed


def generator(shop: Shop) -> Any:
    def allowed() -> Iterator[None]:
        shop.allowed()
        yield

    return allowed


def nested(shop: Shop) -> Any:
    def allowed(_: Annotated[None, Depends(awaited(shop))]) -> None:
        return None

    return allowed


@pytest.mark.parametrize("kind", [plain, awaited, generator, nested], ids=lambda each: each.__name__)
async def test_refusal_of_a_dependency_frees_the_key(kind: Callable[[Shop], Any]) -> None:
    """A dependency's 403 is not kept behind a BaseHTTPMiddleware: with the permission, the same key runs."""
    shop = Shop()
    shop.app.post("/other", status_code=201, dependencies=[Depends(kind(shop))])(shop.pay)
    assert seen(await post(shop.app, "/other")) == (403, False)
    shop.may_pay = True
    assert seen(await post(shop.app, "/other")) == (201, False)
    assert seen(await post(shop.app, "/other")) == (201, True)
    assert shop.runs == 1


@pytest.mark.parametrize("wrong", [b'{"amount": "much"}', b'{"amount": ', b"{}"])
async def test_body_that_does_not_fit_frees_the_key(wrong: bytes) -> None:
    """A body that FastAPI refuses is not kept there either: corrected, it runs under the same key."""
    shop = Shop()
    shop.may_pay = True
    headers = {"Content-Type": "application/json"}
    assert seen(await post(shop.app, "/pay", content=wrong, headers=headers)) == (422, False)
    assert seen(await post(shop.app, "/pay")) == (201, False)
    assert shop.runs == 1


async def test_refusal_of_the_handler_is_kept() -> None:
    """The same status, raised by the handler itself, is its answer, and is kept."""
    shop = Shop()
    shop.may_pay = True
    answers = [await post(shop.app, "/pay", json={"amount": 500}) for _ in range(2)]
    assert [seen(each) for each in answers] == [(403, False), (403, True)]
    assert shop.runs == 1


async def test_mounted_app() -> None:
    """The same holds for an app that is mounted in the guarded one."""
    shop, inner = Shop(), FastAPI()
    inner.post("/pay", status_code=201, dependencies=[Depends(shop.allowed)])(shop.pay)
    shop.app.mount("/inner", inner)
    assert seen(await post(shop.app, "/inner/pay")) == (403, False)
    shop.may_pay = True
    assert seen(await post(shop.app, "/inner/pay")) == (201, False)


@pytest.mark.parametrize("is_per_route", [False, True])
async def test_refusal_of_an_app_that_the_handler_calls_is_not_its_own(*, is_per_route: bool) -> None:
    """A handler that has paid, and calls another app in its process that refuses, has an answer of its own to keep."""
    shop, inner = Guarded() if is_per_route else Shop(), FastAPI()
    inner.post("/receipts")(shop.pay)
    # It has routes of its own that are guarded, and the one that is called is not.
    install(inner, store=AsyncMemoryStore())

    @shop.app.post("/with-receipt", status_code=201, dependencies=shop.dependencies)
    async def pay() -> dict[str, int]:
        shop.runs += 1
        transport = httpx.ASGITransport(app=inner)
        async with httpx.AsyncClient(transport=transport, base_url="http://inner") as client:
            refused = await client.post("/receipts", json={})
        return {"receipt": refused.status_code}

    answers = [await post(shop.app, "/with-receipt") for _ in range(2)]
    assert [seen(each) for each in answers] == [(201, False), (201, True)]
    assert answers[0].json() == {"receipt": 422}
    assert shop.runs == 1
