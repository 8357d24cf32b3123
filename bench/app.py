"""The app that is measured: one JSON handler that writes to no database, so that all of the difference is Semel's."""

from __future__ import annotations

import time

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from semel import SINGLE_TENANT
from semel.asgi import IdempotencyMiddleware


class Orders:
    """The handler, and what the bench asks about it: a replay that ran it would be no replay."""

    def __init__(self) -> None:
        self.ran = 0

    async def create(self, request: Request) -> JSONResponse:
        order = await request.json()
        self.ran += 1
        answer = {"id": f"order_{self.ran}", "amount": order["amount"], "currency": order["currency"], "state": "open"}
        return JSONResponse(answer, status_code=201)

    async def facts(self, _: Request) -> JSONResponse:
        return JSONResponse({"ran": self.ran, "cpu_seconds": time.process_time()})


def app(store: str | None) -> ASGIApp:
    """Build the app: bare, or guarded with *store*."""
    orders = Orders()
    routes = [
        Route("/orders", orders.create, methods=["POST"]),
        Route("/facts", orders.facts),
    ]
    bare = Starlette(routes=routes)
    return bare if store is None else IdempotencyMiddleware(bare, store=store, scope=SINGLE_TENANT)
