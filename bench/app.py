"""The apps that are measured: one JSON handler, with and without a database of its own, with and without a guard. How
they are served is elsewhere.

A second handler, ``/held``, does not answer before it is told to: others wait for it, or its process is killed in it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import asyncpg
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

import semel
from bench import control
from bench.cases import Work
from bench.setup import Setup
from semel import SINGLE_TENANT, Policy
from semel.asgi import IdempotencyMiddleware

#: As many as Semel opens by itself in atomic mode, so that both have the same.
POOL = 16

TABLE = "CREATE TABLE IF NOT EXISTS orders (id bigint GENERATED ALWAYS AS IDENTITY, amount bigint, currency text)"
INSERT = "INSERT INTO orders (amount, currency) VALUES ($1, $2)"

#: Longer than any case makes them wait.
WAIT = timedelta(minutes=5)


class Orders:
    """The handler, and what the bench asks about it: a replay that ran it would be no replay."""

    def __init__(self, setup: Setup) -> None:
        self.ran = 0
        self._database = setup.database
        self._work = WORK[setup.work]
        self._holds = setup.holds
        self._release = asyncio.Event()
        self.pool: Any = None
        #: How many requests for ``/held`` there are, and how many of them its handler has.
        self.asked_to_hold = 0
        self._held = 0

    async def control(self, request: Request) -> Response:
        return await control.once(self.pool, request, self.create)

    async def create(self, request: Request) -> JSONResponse:
        order = await request.json()
        self.ran += 1
        await self._work(self, order)
        answer = {"id": f"order_{self.ran}", "amount": order["amount"], "currency": order["currency"], "state": "open"}
        return JSONResponse(answer, status_code=201)

    async def held(self, request: Request) -> JSONResponse:
        await request.body()
        self.ran += 1
        if self._holds:
            self._held += 1
            await self._release.wait()
            self._held -= 1
        return JSONResponse({"id": f"held_{self.ran}"}, status_code=201)

    async def release(self, _: Request) -> Response:
        self._release.set()
        self._release = asyncio.Event()
        return Response(status_code=204)

    async def facts(self, _: Request) -> JSONResponse:
        facts = {"ran": self.ran, "cpu_seconds": time.process_time(), "waiting": self.asked_to_hold - self._held}
        return JSONResponse(facts)

    @asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        if self._database is None:
            yield
            return
        # Without the query that a pool sends each time it is given a connection back: Semel's own sends none either.
        async with asyncpg.create_pool(self._database, min_size=POOL, max_size=POOL, reset=_no_reset) as self.pool:
            await self.pool.execute(TABLE)
            await self.pool.execute(control.TABLE)
            yield


async def _no_reset(_: object) -> None:
    return


async def _nothing(_: Orders, __: dict[str, Any]) -> None:
    return


async def _transaction(orders: Orders, order: dict[str, Any]) -> None:
    async with orders.pool.acquire() as connection, connection.transaction():
        await connection.execute(INSERT, order["amount"], order["currency"])


async def _atomic(_: Orders, order: dict[str, Any]) -> None:
    await semel.current().connection.execute(INSERT, order["amount"], order["currency"])


async def _commits(orders: Orders, order: dict[str, Any]) -> None:
    for _ in range(3):
        await _transaction(orders, order)


async def _phases(_: Orders, order: dict[str, Any]) -> None:
    operation = semel.current()
    for name in ("ordered", "reserved", "noted"):
        await operation.phase(name, _phase, order)


async def _phase(connection: Any, order: dict[str, Any]) -> None:
    await connection.execute(INSERT, order["amount"], order["currency"])


WORK: dict[Work, Callable[[Orders, dict[str, Any]], Awaitable[None]]] = {
    "nothing": _nothing,
    "control": _nothing,
    "transaction": _transaction,
    "atomic": _atomic,
    "commits": _commits,
    "phases": _phases,
}


def app(setup: Setup) -> ASGIApp:
    """Build the app, bare or guarded."""
    orders = Orders(setup)
    create = orders.control if setup.work == "control" else orders.create
    routes = [
        Route("/orders", create, methods=["POST"]),
        Route("/held", orders.held, methods=["POST"]),
        Route("/release", orders.release, methods=["PUT"]),
        Route("/facts", orders.facts),
    ]
    bare = Starlette(routes=routes, lifespan=orders.lifespan)
    if setup.place is None:
        return bare
    guarded = IdempotencyMiddleware(bare, store=setup.place.given(), scope=SINGLE_TENANT, policy=_policy(setup))
    return _counting(guarded, orders) if setup.holds else guarded


def _counting(guarded: ASGIApp, orders: Orders) -> ASGIApp:
    """Count the requests for ``/held`` on their way in: those that its handler does not have wait."""

    async def count(scope: Scope, receive: Receive, send: Send) -> None:
        is_held = scope.get("path") == "/held"
        orders.asked_to_hold += is_held
        try:
            await guarded(scope, receive, send)
        finally:
            orders.asked_to_hold -= is_held

    return count


def _policy(setup: Setup) -> Policy:
    fields: dict[str, Any] = {"mode": "atomic" if setup.work == "atomic" else "guard"}
    if setup.waiters:
        most = {"max_waiters": setup.waiters, "max_waiters_per_key": setup.waiters}
        fields |= {"in_progress": "wait", "wait": WAIT, **most}
    if setup.lease_seconds is not None:
        fields["lease"] = timedelta(seconds=setup.lease_seconds)
    return Policy.ietf(**fields)
