"""Puts Semel around a FastAPI app. The routes themselves say which requests are guarded."""

from __future__ import annotations

from typing import Any, ClassVar

from fastapi import FastAPI

from semel.asgi.middleware import IdempotencyMiddleware
from semel.asgi.protocol import ASGIApp, ASGIScope, ASGISend, Receive
from semel.asgi.route import NO_STATUS_ROUTE, PerRoute
from semel.core.outcome import Door
from semel.core.policy import Policy
from semel.core.status import STATUS_PATH, checked_path
from semel.errors import ConfigurationError
from semel.fastapi.documentation import document
from semel.fastapi.order import Order
from semel.fastapi.routes import Installed
from semel.fastapi.status import add_status_route
from semel.guard.request import check_modes, switch
from semel.stores import AsyncStore, async_store
from semel.work.backlog import CONCURRENCY


def install(
    app: FastAPI,
    *,
    store: str | AsyncStore | Any = "sqlite:///semel.db",
    policy: Policy | None = None,
    work: bool = False,
    concurrency: int = CONCURRENCY,
    status_path: str = STATUS_PATH,
    status_scope: Any = None,
) -> None:
    """Put Semel around *app*, for the routes that have an ``Idempotent``, and show them in its OpenAPI schema.

    Call it before other middleware is added: what is added later is outside of it, and so sees replays, too. *store*,
    *work* and *concurrency* are those of ``semel.asgi.IdempotencyMiddleware``; *policy* is for routes without one
    of their own. With *status_scope*, the dependency that the guarded routes log in with, requests can be accepted to
    be run later: a route below *status_path* answers for their state.
    """
    switch()
    installed: list[Any] = [each.cls for each in app.user_middleware]
    if RouteMiddleware in installed:
        raise ConfigurationError("Semel is installed on this app already. Call install(app, …) once.")
    store = store if isinstance(store, AsyncStore) else async_store(store)
    check_modes(store, [] if policy is None else [policy])
    path = checked_path(status_path)
    if status_scope is not None and path is not None:
        add_status_route(app, path, status_scope, Policy.ietf() if policy is None else policy)
    elif policy is not None and policy.may_accept:
        raise ConfigurationError(NO_STATUS_ROUTE)
    app.add_middleware(
        RouteMiddleware,
        store=store,
        policy=policy,
        work=work,
        concurrency=concurrency,
        status_path=None if status_scope is None else path,
    )
    document(app, policy)


class RouteMiddleware(IdempotencyMiddleware):
    """The ASGI middleware, which also puts the guard last among the dependencies of each route."""

    #: Tells an outer app that a mounted one has its own install.
    is_installed: ClassVar = True
    door: ClassVar[Door] = "fastapi"

    def __init__(
        self,
        app: ASGIApp,
        *,
        store: str | AsyncStore | Any,
        policy: Policy | None = None,
        work: bool = False,
        concurrency: int = CONCURRENCY,
        status_path: str | None = None,
    ) -> None:
        """Wrap *app*. Its routes say what is guarded; one at *status_path*, if any, answers for operations."""
        super().__init__(
            app,
            store=store,
            scope=PerRoute(tells_status=status_path is not None),
            policy=policy,
            work=work,
            concurrency=concurrency,
            status_path=status_path,
        )
        self._order = Order(Installed(policy or Policy.ietf(), self.store, tells_status=status_path is not None))

    async def __call__(self, scope: ASGIScope, receive: Receive, send: ASGISend) -> None:
        """Serve one connection."""
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
