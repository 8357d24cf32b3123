"""An API that was there before Semel: payments are guarded already, orders are still only watched."""

import logging

from fastapi import FastAPI

from semel import Policy
from semel.asgi import IdempotencyMiddleware, RequestView

logging.basicConfig(level=logging.INFO)  # Each finding is a line of the logger "semel".
orders: list[str] = []
payments: list[int] = []
api = FastAPI()


@api.post("/payments", status_code=201)
def pay(payment: dict[str, int]) -> dict[str, int]:
    payments.append(payment["amount"])
    return {"payment": len(payments)}


@api.post("/orders", status_code=201)
def order(order: dict[str, str]) -> dict[str, int]:
    orders.append(order["item"])
    return {"order": len(orders)}


@api.get("/internal/idempotency")
def idempotency() -> dict[str, dict[str, int]]:
    return {route: {**counts} for route, counts in app.tally.snapshot().routes.items()}


def user_of(request: RequestView) -> str | None:
    return request.headers.get("x-account")


app = IdempotencyMiddleware(
    api,
    store="sqlite:///semel.db",
    scope=user_of,
    paths={
        "/payments": Policy.ietf(required=True),
        "/orders": Policy.ietf(required=True, enforcement="report"),
    },
)
