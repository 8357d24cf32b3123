"""Atomic mode: the order, its message and the answer to the request are one commit."""

import os

from fastapi import FastAPI

import semel
from semel.asgi import IdempotencyMiddleware

app = FastAPI()
app.add_middleware(
    IdempotencyMiddleware,
    store=os.environ["DATABASE_URL"],  # the database that the orders are in
    scope=semel.SINGLE_TENANT,
    policy=semel.Policy.ietf(mode="atomic", required=True),
)


@app.post("/orders", status_code=201)
async def pay(order: dict[str, int]) -> dict[str, object]:
    operation, number = semel.current(), order["number"]
    await operation.connection.execute("INSERT INTO orders (number) VALUES ($1)", number)
    message_id = await operation.publish("order.paid", {"order": number}, key=f"order-{number}")
    return {"order": number, "message": message_id}
