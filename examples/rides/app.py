"""The API: ``POST /rides`` books a ride, charges a card and mails a receipt. Each happens once, wherever it is killed.

A retry goes on where the last attempt stopped. The steps inside the database are in ``sqlite.py`` or ``postgres.py``,
those outside in ``effects.py``.
"""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta

import httpx
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

import semel
from examples.rides import postgres, sqlite
from examples.rides.effects import charge_card, find_receipt, send_receipt
from semel.asgi import IdempotencyMiddleware
from semel.guard.request import RequestView

STORE = os.environ.get("RIDES_STORE", "sqlite:///rides.db")
PROVIDER = os.environ.get("RIDES_PROVIDER", "http://127.0.0.1:8001")

LEASE = timedelta(seconds=2)  # How long a killed worker's ride waits. Short for the story; the usual 30 s is fine.
PATIENCE_SECONDS = 2.0  # with the provider


async def book(request: Request) -> JSONResponse:
    """Every step is recorded when it is done. However this function stops, a retry gets the results of those steps."""
    operation, here, wanted = semel.current(), request.app.state, await _wanted(request)
    ride = await operation.phase("ride_created", here.tables.create_ride, operation.scope, wanted)
    charge = await operation.effect("charge_created", charge_card, here.provider, ride, wanted["card"])
    if "declined" in charge:
        ride = await operation.phase("ride_declined", here.tables.mark, ride, "declined")
        return JSONResponse(ride | charge, 402)
    ride = await operation.phase("ride_charged", here.tables.mark, ride, "charged", charge["id"])
    await operation.effect("receipt_sent", send_receipt, here.provider, ride, verify=find_receipt)
    return JSONResponse(ride, 201)


async def list_rides(request: Request) -> JSONResponse:
    """Not guarded: reading needs no key."""
    return JSONResponse(await request.app.state.tables.all_rides(request.app.state.store))


async def try_again(_request: Request, _error: Exception) -> JSONResponse:
    """The provider is in trouble. The steps that are done stay done, and the same request goes on after them."""
    return JSONResponse({"error": "The provider did not answer."}, 503, headers={"Retry-After": "1"})


async def _wanted(request: Request) -> dict[str, str]:
    try:
        content = await request.json()
        return {name: str(content[name]) for name in ("from", "to", "card")}
    except (ValueError, TypeError, KeyError):
        raise HTTPException(400, 'Send {"from": ..., "to": ..., "card": ...}.') from None


def user_of(request: RequestView) -> str | None:
    """Return the rider. A real API asks its authentication."""
    return request.headers.get("x-rider")


def make_app(store: str = STORE, provider: str = PROVIDER) -> IdempotencyMiddleware:
    """Make the API. With ``work=True`` it also finishes rides that no client retries."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        app.state.store, app.state.tables = store, sqlite if store.startswith("sqlite:") else postgres
        await app.state.tables.create_table(store)
        async with httpx.AsyncClient(base_url=provider, timeout=PATIENCE_SECONDS) as app.state.provider:
            yield

    routes = [Route("/rides", book, methods=["POST"]), Route("/rides", list_rides)]
    app = Starlette(routes=routes, exception_handlers={httpx.HTTPError: try_again}, lifespan=lifespan)
    policy = semel.Policy.ietf(required=True, store_request=True, lease=LEASE)
    return IdempotencyMiddleware(app, store=store, scope=user_of, policy=policy, work=True)
