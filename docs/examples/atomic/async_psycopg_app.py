"""Atomic mode on psycopg's AsyncConnection, taken from the application's own pool."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from psycopg_pool import AsyncConnectionPool
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

import semel
from semel.asgi import IdempotencyMiddleware

TAKE = "UPDATE accounts SET balance = balance - %(n)s WHERE name = 'alice' AND balance >= %(n)s RETURNING balance"
GIVE = "UPDATE accounts SET balance = balance + %(n)s WHERE name = 'bob'"

pool = AsyncConnectionPool(os.environ["DATABASE_URL"], open=False)


async def transfer(request: Request) -> JSONResponse:
    amount = {"n": (await request.json())["amount"]}
    connection = semel.current().connection  # a psycopg.AsyncConnection, inside a transaction
    taken = await (await connection.execute(TAKE, amount)).fetchone()
    if taken is None:
        raise HTTPException(402, "Not enough money.")
    await connection.execute(GIVE, amount)
    return JSONResponse({"moved": amount["n"], "left": taken[0]}, 201)


@asynccontextmanager
async def lifespan(_app: Starlette) -> AsyncIterator[None]:
    async with pool:  # what the application gave, the application opens and closes
        yield


app = Starlette(
    routes=[Route("/transfers", transfer, methods=["POST"])],
    lifespan=lifespan,
    middleware=[
        Middleware(
            IdempotencyMiddleware,
            store=pool,
            scope=semel.SINGLE_TENANT,
            policy=semel.Policy.ietf(mode="atomic", required=True),
        )
    ],
)
