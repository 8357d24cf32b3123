"""Atomic mode on psycopg, taken from the application's own pool."""

import os

from flask import Flask, request
from psycopg_pool import ConnectionPool

import semel
from semel.wsgi import IdempotencyMiddleware

TAKE = "UPDATE accounts SET balance = balance - %(n)s WHERE name = 'alice' AND balance >= %(n)s RETURNING balance"
GIVE = "UPDATE accounts SET balance = balance + %(n)s WHERE name = 'bob'"

pool = ConnectionPool(os.environ["DATABASE_URL"], open=True)
app = Flask(__name__)


@app.post("/transfers")
def transfer() -> tuple[dict[str, object], int]:
    amount = {"n": request.get_json()["amount"]}
    connection = semel.current().connection  # a psycopg.Connection, inside a transaction
    taken = connection.execute(TAKE, amount).fetchone()
    if taken is None:
        return {"error": "not enough money"}, 402
    connection.execute(GIVE, amount)
    return {"moved": amount["n"], "left": taken[0]}, 201


app.wsgi_app = IdempotencyMiddleware(  # type: ignore[method-assign]  # Flask's own way to add WSGI middleware
    app.wsgi_app,
    store=pool,
    scope=semel.SINGLE_TENANT,
    policy=semel.Policy.ietf(mode="atomic", required=True),
)
