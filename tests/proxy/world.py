"""The shop of ``tests/web/harness.py`` behind the proxy: its handlers run in a server of their own, over a socket."""

import asyncio
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import uvicorn
from starlette.responses import Response as StarletteResponse
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from semel import Policy
from semel.asgi import IdempotencyMiddleware
from semel.core.key import find
from semel.core.record import Hold
from semel.guard.request import Paths, RequestView
from semel.operation import Operation, enter
from semel.proxy.app import Forwarder, Proxy
from semel.proxy.headers import HeaderRules
from semel.proxy.health import Health
from semel.proxy.scope import Peers
from semel.proxy.upstream import Address, Upstream
from tests.web.harness import HANG_SECONDS, AsgiWorld, Request, Send, Shop, call_asgi, starlette

#: The shop asks for the operation that it runs for. In another process there is none: what it says is what was sent.
_TOKEN = bytes(16)


class ProxyWorld(AsgiWorld):
    """The proxy, without the server in front of it; the upstream is uvicorn."""

    def __init__(self, open_store: Callable[[], Any]) -> None:
        super().__init__(open_store)
        self._ends: list[Callable[[], Any]] = []

    def guard(self, shop: Shop, scope: Callable[[RequestView], str | None], policy: Policy, paths: Paths) -> Send:
        upstream = self.submit(self._serve(shop, policy)).result(HANG_SECONDS)
        rules = HeaderRules(None, policy.header_names)
        forwarder = Forwarder(upstream, rules, policy, timedelta(seconds=HANG_SECONDS))
        guard = IdempotencyMiddleware(
            forwarder,
            store=self.store,
            scope=scope,
            policy=policy,
            paths=paths,
        )
        health = Health(guard.store, guard.guard.gate, partial(upstream.is_up, None), alive="", ready="")
        proxy = Proxy(guard, forwarder, rules, Peers(), health)

        async def authenticated(scope: Any, receive: Any, send: Any) -> None:
            if shop.is_locked:
                await StarletteResponse("Who are you?", 401)(scope, receive, send)
            else:
                await proxy(scope, receive, send)

        return lambda request: self.submit(call_asgi(authenticated, _framed(request)))

    async def _serve(self, shop: Shop, policy: Policy) -> Upstream:
        app = starlette(shop)

        async def with_operation(scope: Any, receive: Any, send: Any) -> None:
            attempt = dict(scope["headers"]).get(b"semel-attempt")
            key = find(tuple(scope["headers"]), policy.header_names) if attempt is not None else None
            with enter(Operation(Hold("", key.value, int(attempt), _TOKEN)) if attempt and key else None):
                await app(scope, receive, send)

        config = uvicorn.Config(with_operation, http=HttpToolsProtocol, log_config=None, lifespan="off")
        state = ServerState()
        listener = await asyncio.get_running_loop().create_server(
            lambda: HttpToolsProtocol(config, state, {}), "127.0.0.1", 0
        )
        upstream = Upstream(
            Address(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"),
            connect_timeout=timedelta(seconds=5),
            keepalive=timedelta(seconds=1),
            connections=100,
        )
        upstream.open()

        async def end() -> None:
            await upstream.close()
            listener.close()
            for each in list(state.connections):
                each.transport.close()

        self._ends.append(end)
        return upstream

    def close(self) -> None:
        async def end_all() -> None:
            for end in self._ends:
                await end()
            await asyncio.sleep(0.05)

        self.submit(end_all()).result(HANG_SECONDS)
        super().close()


def _framed(request: Request) -> Request:
    """Add what a client sends over a socket."""
    host = () if any(name.lower() == "host" for name, _ in request.lines) else (("Host", b"shop"),)
    lines = [*host, *request.lines, ("Content-Length", str(len(request.body)).encode())]
    return Request(request.method, request.target, tuple(lines), request.body, request.mount)
