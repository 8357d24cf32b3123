"""Semel around a FastAPI app. Which of its requests are guarded, the routes say."""

from __future__ import annotations

from typing import Any, ClassVar

from fastapi import FastAPI

from semel.asgi.middleware import IdempotencyMiddleware
from semel.asgi.protocol import ASGIApp, ASGIScope, ASGISend, Receive
from semel.asgi.route import PER_ROUTE
from semel.core.policy import Policy
from semel.errors import ConfigurationError
from semel.fastapi.documentation import document
from semel.fastapi.order import Order
from semel.stores import AsyncStore


def install(
    app: FastAPI,
    *,
    store: str | AsyncStore | Any = "sqlite:///semel.db",
    policy: Policy | None = None,
    work: bool = False,
) -> None:
    """Put Semel around *app*, for the routes that have an ``Idempotent``, and show them in its OpenAPI schema.

    Call it before other middleware is added: what is added later is further outside, and so sees replays too. *store*
    and *work* are those of ``semel.asgi.IdempotencyMiddleware``; *policy* is that of routes without one of their own.
    """
    installed: list[Any] = [each.cls for each in app.user_middleware]
    if RouteMiddleware in installed:
        raise ConfigurationError("Semel is installed on this app already. Call install(app, …) once.")
    app.add_middleware(RouteMiddleware, store=store, policy=policy, work=work)
    document(app, policy)


class RouteMiddleware(IdempotencyMiddleware):
    """The ASGI middleware, with an eye on the app's routes: each guard is asked last."""

    #: By this an outer app knows a mounted one that has an install of its own.
    is_installed: ClassVar = True

    def __init__(
        self, app: ASGIApp, *, store: str | AsyncStore | Any, policy: Policy | None = None, work: bool = False
    ) -> None:
        """Wrap *app*, whose routes say what is guarded."""
        super().__init__(app, store=store, scope=PER_ROUTE, policy=policy, work=work)
        self._order = Order(Policy.ietf() if policy is None else policy)

    async def __call__(self, scope: ASGIScope, receive: Receive, send: ASGISend) -> None:
        """Serve one connection of the server's."""
        if scope["type"] == "http":
            self._order.see(scope["app"].routes)
        elif scope["type"] == "lifespan":
            try:
                self._order.see(scope["app"].routes)
            except ConfigurationError as error:
                await receive()
                await send({"type": "lifespan.startup.failed", "message": str(error)})
                raise
        await super().__call__(scope, receive, send)
