"""The apps that are measured: one JSON handler, with and without a database of its own, with and without a guard."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import ASGIApp

import semel
from bench.cases import Work
from semel import SINGLE_TENANT, Policy
from semel.asgi import IdempotencyMiddleware

#: As many as Semel opens by itself in atomic mode, so that both have the same.
POOL = 16

TABLE = "CREATE TABLE IF NOT EXISTS orders (id bigint GENERATED ALWAYS AS IDENTITY, amount bigint, currency text)"
INSERT = "INSERT INTO orders (amount, currency) VALUES ($1, $2)"


class Orders:
    """The handler, and what the bench asks about it: a replay that ran it would be no replay."""

    def __init__(self, work: Work, database: str | None) -> None:
        self.ran = 0
        self._database = database
        self._work = WORK[work]
        self.pool: Any = None

    async def create(self, request: Request) -> JSONResponse:
        order = await request.json()
        self.ran += 1
        await self._work(self, order)
        answer = {"id": f"order_{self.ran}", "amount": order["amount"], "currency": order["currency"], "state": "open"}
        return JSONResponse(answer, status_code=201)

    async def facts(self, _: Request) -> JSONResponse:
        return JSONResponse({"ran": self.ran, "cpu_seconds": time.process_time()})

    @asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        if self._database is None:
            yield
            return
        # Without the query that a pool sends each time it is given a connection back: Semel's own sends none either.
        async with asyncpg.create_pool(self._database, min_size=POOL, max_size=POOL, reset=_no_reset) as self.pool:
            await self.pool.execute(TABLE)
            yield


async def _no_reset(_: object) -> None:
    return


async def _nothing(_: Orders, __: dict[str, Any]) -> None:
    return


async def _insert(orders: Orders, order: dict[str, Any]) -> None:
    async with orders.pool.acquire() as connection:
        await connection.execute(INSERT, order["amount"], order["currency"])


async def _atomic(_: Orders, order: dict[str, Any]) -> None:
    await semel.current().connection.execute(INSERT, order["amount"], order["currency"])


async def _commits(orders: Orders, order: dict[str, Any]) -> None:
    for _ in range(3):
        async with orders.pool.acquire() as connection, connection.transaction():
            await connection.execute(INSERT, order["amount"], order["currency"])


async def _phases(_: Orders, order: dict[str, Any]) -> None:
    operation = semel.current()
    for name in ("ordered", "reserved", "noted"):
        await operation.phase(name, _phase, order)


async def _phase(connection: Any, order: dict[str, Any]) -> None:
    await connection.execute(INSERT, order["amount"], order["currency"])


WORK: dict[Work, Callable[[Orders, dict[str, Any]], Awaitable[None]]] = {
    "nothing": _nothing,
    "insert": _insert,
    "atomic": _atomic,
    "commits": _commits,
    "phases": _phases,
}


def app(store: str | None, work: Work = "nothing", database: str | None = None) -> ASGIApp:
    """Build the app: bare, or guarded with *store*; its handler does *work* in *database*."""
    orders = Orders(work, database)
    routes = [
        Route("/orders", orders.create, methods=["POST"]),
        Route("/facts", orders.facts),
    ]
    bare = Starlette(routes=routes, lifespan=orders.lifespan)
    if store is None:
        return bare
    policy = Policy.ietf(mode="atomic" if work == "atomic" else "guard")
    return IdempotencyMiddleware(bare, store=store, scope=SINGLE_TENANT, policy=policy)
