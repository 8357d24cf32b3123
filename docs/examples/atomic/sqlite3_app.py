"""Atomic mode on sqlite3: accounts and keys are in one file."""

from flask import Flask, request

import semel
from semel.wsgi import IdempotencyMiddleware

TAKE = "UPDATE accounts SET balance = balance - :n WHERE name = 'alice' AND balance >= :n RETURNING balance"
GIVE = "UPDATE accounts SET balance = balance + :n WHERE name = 'bob'"

app = Flask(__name__)


@app.post("/transfers")
def transfer() -> tuple[dict[str, object], int]:
    amount = {"n": request.get_json()["amount"]}
    connection = semel.current().connection  # a sqlite3.Connection, inside a transaction
    taken = connection.execute(TAKE, amount).fetchall()
    if not taken:
        return {"error": "not enough money"}, 402
    connection.execute(GIVE, amount)
    return {"moved": amount["n"], "left": taken[0][0]}, 201


app.wsgi_app = IdempotencyMiddleware(  # type: ignore[method-assign]  # Flask's own way to add WSGI middleware
    app.wsgi_app,
    store="sqlite:///bank.db",  # the file that the accounts are in
    scope=semel.SINGLE_TENANT,
    policy=semel.Policy.ietf(mode="atomic", required=True),
)
