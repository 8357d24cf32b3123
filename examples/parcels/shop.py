"""The shop: ``POST /orders`` writes an order and the message that it is paid, in one commit with the answer.

It knows nothing of brokers: a relay reads the message from the shop's own database. What comes of it is in
``shipping.py``.
"""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta

import asyncpg
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

import semel
from semel.asgi import IdempotencyMiddleware
from semel.guard.request import RequestView

STORE = os.environ["SHOP_STORE"]
LEASE = timedelta(seconds=1)  # How long a killed worker's order waits. Short for the story; the usual 30 s is fine.

# No unique constraint: what is written twice is to be seen twice.
TABLE = "CREATE TABLE IF NOT EXISTS orders (id bigint GENERATED ALWAYS AS IDENTITY, customer text, item text)"
INSERT = "INSERT INTO orders (customer, item) VALUES ($1, $2) RETURNING id"


async def place_order(request: Request) -> JSONResponse:
    """The order, the message and this answer are one commit: a kill at any moment leaves all of them, or none."""
    operation, wanted = semel.current(), await request.json()
    order = await operation.connection.fetchval(INSERT, operation.scope, wanted["item"])
    paid = {"order": order, "customer": operation.scope, "item": wanted["item"]}
    await operation.publish("order.paid", paid, to="orders", key=operation.scope)
    return JSONResponse(paid, 201)


def customer_of(request: RequestView) -> str | None:
    """Return the customer. A real API asks its authentication."""
    return request.headers.get("x-customer")


@asynccontextmanager
async def _lifespan(_app: Starlette) -> AsyncIterator[None]:
    connection = await asyncpg.connect(STORE)
    await connection.execute(TABLE)
    await connection.close()
    yield


app = IdempotencyMiddleware(
    Starlette(routes=[Route("/orders", place_order, methods=["POST"])], lifespan=_lifespan),
    store=STORE,
    scope=customer_of,
    policy=semel.Policy.ietf(required=True, mode="atomic", lease=LEASE),
)
