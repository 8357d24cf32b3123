"""A phase: its writes, its messages and its result are one commit, after the card was charged."""

import sqlite3

from fastapi import FastAPI

import semel
from semel.asgi import IdempotencyMiddleware

charges: dict[str, int] = {}  # stands in for a payment provider, which keeps keys

app = FastAPI()
app.add_middleware(IdempotencyMiddleware, store="sqlite:///shop.db", scope=semel.SINGLE_TENANT)


def charge(number: int, *, idempotency_key: str) -> str:
    charges.setdefault(idempotency_key, number)
    return f"ch_{idempotency_key[:8]}"


def record(connection: sqlite3.Connection, number: int, charged: str) -> None:
    connection.execute("INSERT INTO orders (number) VALUES (?)", [number])
    semel.current().publish("order.paid", {"order": number, "charge": charged}, key=f"order-{number}")
    semel.current().publish("receipt", {"order": number}, to="mail")


@app.post("/orders", status_code=201)
def pay(order: dict[str, int]) -> dict[str, str]:
    operation = semel.current()
    charged = operation.effect("charged", charge, order["number"])
    operation.phase("recorded", record, order["number"], charged)
    return {"charge": charged}
