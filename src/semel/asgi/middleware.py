"""The middleware, and the server's start and end. What happens to one request is in ``exchange.py``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from semel.asgi.exchange import Exchange
from semel.asgi.protocol import ASGIApp, ASGIScope, ASGISend, Message, Receive, full_path
from semel.core.policy import Policy
from semel.door import Paths, RequestView, Routes, checked_scope
from semel.errors import ConfigurationError, StoreUnavailable
from semel.stores import AsyncStore, async_store
from semel.stores.keeper import AsyncKeeper
from semel.telemetry.logs import logger

WhoseRequest = Callable[[RequestView], str | Awaitable[str | None] | None]


class IdempotencyMiddleware:
    """Guards the unsafe requests of an ASGI app that carry an idempotency key. Everything else passes untouched."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        store: str | AsyncStore = "sqlite:///semel.db",
        scope: WhoseRequest,
        policy: Policy | None = None,
        paths: Paths = None,
    ) -> None:
        """Wrap *app*. *scope* says whose request it is; *paths* may narrow down what is guarded."""
        self.app = app
        self.store = async_store(store) if isinstance(store, str) else store
        if not isinstance(self.store, AsyncStore):
            raise ConfigurationError(f"store must be a URL or, under ASGI, an AsyncStore, not {type(store).__name__}.")
        self.scope = checked_scope(scope)
        self.routes = Routes(policy, paths)
        self.keeper = AsyncKeeper(self.store.perform)

    async def __call__(self, scope: ASGIScope, receive: Receive, send: ASGISend) -> None:
        """Serve one connection of the server's."""
        if scope["type"] == "http":
            policy = self.routes.policy_for(scope["method"], full_path(scope))
            if policy is not None:
                exchange = Exchange(self.app, self.store, self.keeper, self.scope, policy)
                await exchange.serve(scope, receive, send)
                return
        elif scope["type"] == "lifespan":
            await self.app(scope, receive, _Lifespan(self, send))
            return
        await self.app(scope, receive, send)


class _Lifespan:
    """The server's start and end, which are also the store's."""

    def __init__(self, middleware: IdempotencyMiddleware, send: ASGISend) -> None:
        self._middleware = middleware
        self._send = send

    async def __call__(self, message: Message) -> None:
        store = self._middleware.store
        if message["type"] == "lifespan.startup.complete":
            try:
                await store.open()
            except StoreUnavailable as error:
                # It may be up again before the first request is. Until then, requests are refused with 503.
                logger.warning("%s", error)
            except Exception as error:
                await self._send({"type": "lifespan.startup.failed", "message": str(error)})
                raise
        elif message["type"].startswith("lifespan.shutdown."):
            self._middleware.keeper.close()
            await store.close()
        await self._send(message)
