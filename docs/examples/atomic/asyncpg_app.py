"""Atomic mode on asyncpg: the transfer and its answer are one commit."""

import os

from fastapi import FastAPI, HTTPException

import semel
from semel.asgi import IdempotencyMiddleware

TAKE = "UPDATE accounts SET balance = balance - $1 WHERE name = $2 AND balance >= $1 RETURNING balance"
GIVE = "UPDATE accounts SET balance = balance + $1 WHERE name = $2"

app = FastAPI()
app.add_middleware(
    IdempotencyMiddleware,
    store=os.environ["DATABASE_URL"],  # the database that the accounts are in
    scope=semel.SINGLE_TENANT,
    policy=semel.Policy.ietf(mode="atomic", required=True),
)


@app.post("/transfers", status_code=201)
async def transfer(order: dict[str, int]) -> dict[str, int]:
    amount = order["amount"]
    connection = semel.current().connection  # an asyncpg connection, inside a transaction
    left = await connection.fetchval(TAKE, amount, "alice")
    if left is None:
        raise HTTPException(402, "Not enough money.")
    await connection.execute(GIVE, amount, "bob")
    return {"moved": amount, "left": left}
