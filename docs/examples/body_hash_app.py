"""Orders from a till that can't send a key: the same order within ten minutes is the same order."""

import os
from datetime import timedelta
from typing import Any

from fastapi import FastAPI

from semel import BodyHash, Policy
from semel.asgi import IdempotencyMiddleware, RequestView

orders: list[Any] = []

same_order = BodyHash(
    fields=["table", "lines.item", "lines.count"],
    window=timedelta(minutes=10),
    unless_header="X-Order-Number",  # A till that has one says by it that the guests want the same again.
    secret=os.environ.get("ORDER_KEY_SECRET", "only for this example").encode(),
)


def which_till(request: RequestView) -> str | None:
    return request.headers.get("x-till")


app = FastAPI()
app.add_middleware(
    IdempotencyMiddleware,
    store="sqlite:///semel.db",
    scope=which_till,
    policy=Policy.ietf(key_from=same_order),
)


@app.post("/orders", status_code=201)
def order(order: dict[str, Any]) -> dict[str, int]:
    orders.append(order["lines"])
    return {"order": len(orders)}
