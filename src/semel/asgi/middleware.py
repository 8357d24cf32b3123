"""The middleware, and the server's start and end. What happens to one request is in ``exchange.py``."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from semel.asgi.exchange import AppGuard, Exchange
from semel.asgi.protocol import (
    EXCHANGE,
    WHOLE_APP,
    ASGIApp,
    ASGIScope,
    ASGISend,
    Message,
    Receive,
    full_path,
    method_of,
)
from semel.asgi.route import PerRoute, RouteExchange
from semel.asgi.stored import scope_of, surroundings_of
from semel.core.commands import Look, Park, ReadRequest
from semel.core.policy import NEVER_GUARDED, Policy
from semel.core.record import Stuck
from semel.door import Gate, Paths, RequestView, Routes, checked_scope
from semel.errors import StoreUnavailable
from semel.stores import AsyncStore, async_store
from semel.stores.keeper import AsyncKeeper
from semel.telemetry.logs import logger
from semel.telemetry.tally import Tally
from semel.work import AsyncCompleter, AsyncReaper, AsyncService, AsyncSweeper, AsyncWorkers

WhoseRequest = Callable[[RequestView], str | Awaitable[str | None] | None]


class IdempotencyMiddleware:
    """Guards the unsafe requests of an ASGI app that carry an idempotency key. Everything else passes untouched."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        store: str | AsyncStore | Any = "sqlite:///semel.db",
        scope: WhoseRequest,
        policy: Policy | None = None,
        paths: Paths = None,
        work: bool = False,
    ) -> None:
        """Wrap *app*. *scope* says whose request it is; *paths* may narrow down what is guarded.

        With ``scope=PER_ROUTE`` each route says for itself, once the application's own login has run: *policy* is then
        that of ``semel work``, and of routes that have none of their own.

        *store* is a URL, a store, or what the application already has: an SQLAlchemy async engine or sessionmaker, a
        pool of asyncpg's or psycopg's. With *work*, this process also sweeps, reaps and finishes what no client came
        back for, as ``semel work`` does.
        """
        self.app = app
        self.store = store if isinstance(store, AsyncStore) else async_store(store)
        self.routes = Routes(policy, paths)
        #: What a policy with enforcement="report" has seen in this process: ``tally.snapshot()``.
        self.tally = Tally()
        self.guard = AppGuard(
            store=self.store,
            keeper=AsyncKeeper(self.store.perform),
            gate=Gate(),
            tally=self.tally,
            app=app,
            scope=checked_scope(scope),
        )

        self.workers = AsyncWorkers(services(self)) if work else None
        self._is_per_route = isinstance(scope, PerRoute)
        self._surroundings: dict[str, Any] = {}

    async def finish(self, stuck: Stuck) -> int | None:
        """Run a stuck operation's stored request again; return the status it ended with, None when it did not end."""
        if self.guard.gate.is_closed:
            return None
        hold = stuck.hold
        request = await self.store.perform(ReadRequest(hold))
        if request is None:
            return None
        scope = scope_of(request, self._surroundings)
        policy = self.routes.policy_for(request.head.method, full_path(scope))
        if policy is None:
            logger.error("%s %s is not guarded any more: it is parked.", request.head.method, scope["path"])
            await self.store.perform(Park(hold, if_silent=True))
            return None
        try:
            await Exchange(self.guard, policy).finish(stuck, request, scope)
        except BaseException:
            # The app's own, unless it is us who are stopped. There is no server to report it to.
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            logger.exception("%s %s failed again.", request.head.method, request.head.path)
        record = await self.store.perform(Look(hold.scope, hold.key))
        return record.answer.status if record and record.answer else None

    def drain(self) -> None:
        """Take on nothing new: guarded requests are refused (503), and those under way end. SIGTERM does this too."""
        self.guard.gate.close()

    async def __call__(self, scope: ASGIScope, receive: Receive, send: ASGISend) -> None:
        """Serve one connection of the server's."""
        if scope["type"] == "http":
            if self.workers is not None and not self.workers.are_running:
                # Not every server speaks of its start.
                self._surroundings = surroundings_of(scope)
                self.workers.start()
            exchange = self._exchange(scope)
            if exchange is not None:
                await exchange.serve(scope, receive, send)
                return
        elif scope["type"] == "lifespan":
            self._surroundings = surroundings_of(scope)
            await self.app(scope, receive, _Lifespan(self, send))
            return
        await self.app(scope, receive, send)

    def _exchange(self, scope: ASGIScope) -> Exchange | None:
        method, path = method_of(scope), full_path(scope)
        if not self._is_per_route:
            policy = self.routes.policy_for(method, path)
            return Exchange(self.guard, policy) if policy is not None else None
        # Claimed around the whole app already, and the route that claims it again is to be told so.
        is_taken = scope.get(EXCHANGE) == WHOLE_APP
        policy = None if is_taken or method in NEVER_GUARDED else self.routes.policy_at(path)
        return RouteExchange(self.guard, policy) if policy is not None else None


class _Lifespan:
    """The server's start and end, which are also the store's."""

    def __init__(self, middleware: IdempotencyMiddleware, send: ASGISend) -> None:
        self._middleware = middleware
        self._send = send

    async def __call__(self, message: Message) -> None:
        store = self._middleware.store
        if message["type"] == "lifespan.startup.complete":
            self._middleware.guard.gate.close_on_sigterm()
            try:
                await store.open()
            except StoreUnavailable as error:
                # It may be up again before the first request is. Until then, requests are refused with 503.
                logger.warning("%s", error)
            except Exception as error:
                await self._send({"type": "lifespan.startup.failed", "message": str(error)})
                raise
            if self._middleware.workers is not None:
                self._middleware.workers.start()
        elif message["type"].startswith("lifespan.shutdown."):
            if self._middleware.workers is not None:
                await self._middleware.workers.stop()
            self._middleware.guard.keeper.close()
            await store.close()
        await self._send(message)


def services(middleware: IdempotencyMiddleware) -> list[AsyncService]:
    """Return what cleans up behind *middleware*."""
    store = middleware.store
    return [AsyncSweeper(store, has_completer=True), AsyncReaper(store), AsyncCompleter(store, middleware.finish)]
