"""The order's number is its key: a second click gets the stored order, and another total under it is refused."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager

from flask import Flask, request

from semel.natural import RowDiffers, insert_or_get

TABLE = """
CREATE TABLE IF NOT EXISTS orders (
    id INTEGER PRIMARY KEY,
    merchant INTEGER NOT NULL,
    number TEXT NOT NULL,
    total INTEGER NOT NULL,
    status TEXT NOT NULL,
    UNIQUE (merchant, number)
)
"""

app = Flask(__name__)


@contextmanager
def transaction() -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect("shop.db")) as connection, connection:  # the second commits, or rolls back
        connection.execute(TABLE)
        yield connection


@app.put("/merchants/<int:merchant>/orders/<number>")
def order(merchant: int, number: str) -> tuple[dict[str, object], int]:
    with transaction() as connection:
        got = insert_or_get(
            connection,
            "orders",
            {"merchant": merchant, "number": number, "total": request.get_json()["total"], "status": "new"},
            unique=("merchant", "number"),
            same=("total",),  # not the status: by the time of a retry it may be another
        )
    return got.row, 201 if got.is_new else 200


@app.post("/merchants/<int:merchant>/orders/<number>/pay")
def pay(merchant: int, number: str) -> dict[str, str]:
    with transaction() as connection:
        connection.execute("UPDATE orders SET status = 'paid' WHERE merchant = ? AND number = ?", (merchant, number))
    return {"status": "paid"}


@app.errorhandler(RowDiffers)
def refuse(refusal: RowDiffers) -> tuple[dict[str, str], int]:
    return {"code": refusal.slug, "detail": refusal.detail}, refusal.status  # 422
