"""A double click on *Pay* gets the first click's answer, and not a 409."""

import asyncio
from datetime import timedelta

from fastapi import FastAPI

from semel import SINGLE_TENANT, Policy
from semel.asgi import IdempotencyMiddleware

payments: list[int] = []

app = FastAPI()
app.add_middleware(
    IdempotencyMiddleware,
    store="sqlite:///semel.db",
    scope=SINGLE_TENANT,
    paths={
        "/payments": Policy.ietf(in_progress="wait", wait=timedelta(seconds=8)),
        # Here a client waits only if it says so, by `Prefer: wait=5`.
        "/orders": Policy.ietf(),
    },
)


@app.post("/payments", status_code=201)
async def pay(order: dict[str, int]) -> dict[str, int]:
    await asyncio.sleep(0.5)  # A provider that takes its time.
    payments.append(order["amount"])
    return {"payment": len(payments)}


@app.post("/orders", status_code=201)
async def take_order(order: dict[str, str]) -> dict[str, str]:
    await asyncio.sleep(0.5)
    return order
