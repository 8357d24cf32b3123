"""Three steps: a retry after a crash goes on where the last attempt stopped."""

import sqlite3

from fastapi import FastAPI

import semel
from semel.asgi import IdempotencyMiddleware

charges: dict[str, int] = {}  # stands in for a payment provider, which keeps keys

app = FastAPI()
app.add_middleware(IdempotencyMiddleware, store="sqlite:///shop.db", scope=semel.SINGLE_TENANT)


def create_order(connection: sqlite3.Connection, amount: int) -> int | None:
    connection.execute("CREATE TABLE IF NOT EXISTS orders (id INTEGER PRIMARY KEY, amount INTEGER, charge TEXT)")
    return connection.execute("INSERT INTO orders (amount) VALUES (?)", [amount]).lastrowid


def charge_card(amount: int, *, idempotency_key: str) -> str:
    charges.setdefault(idempotency_key, amount)
    return f"ch_{idempotency_key[:8]}"


def mark_paid(connection: sqlite3.Connection, order: int | None, charge: str) -> None:
    connection.execute("UPDATE orders SET charge = ? WHERE id = ?", [charge, order])


@app.post("/orders", status_code=201)
def buy(wanted: dict[str, int]) -> dict[str, object]:
    operation = semel.current()
    order = operation.phase("order_created", create_order, wanted["amount"])
    charge = operation.effect("card_charged", charge_card, wanted["amount"])
    operation.phase("order_paid", mark_paid, order, charge)
    return {"order": order, "charge": charge}
