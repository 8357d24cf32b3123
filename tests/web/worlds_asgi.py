"""The same shop as in ``harness.py``, in the frameworks that people build their ASGI apps with."""

import asyncio
from collections.abc import Callable
from typing import Annotated, Any, cast

from fastapi import Depends, FastAPI, HTTPException
from fastapi import Request as FastapiRequest
from litestar import Litestar
from litestar import Request as LitestarRequest
from litestar.handlers import HTTPRouteHandler
from litestar.types import ControllerRouterHandler
from starlette.responses import PlainTextResponse, Response, StreamingResponse

from semel import Operation, Policy
from semel.asgi import IdempotencyMiddleware
from semel.asgi.protocol import ASGIApp, full_path, head_of
from semel.fastapi import Idempotent, install
from semel.guard.request import Paths, RequestView
from tests.web.harness import METHODS, AsgiWorld, Reply, Send, Shop, call_asgi

Whose = Callable[[RequestView], str | None]

#: Those that Litestar has a word for.
LITESTARS_METHODS = [method for method in METHODS if method not in {"TRACE", "QUERY"}]


def answer_of(reply: Reply) -> Response:
    if isinstance(reply.body, bytes):
        response = Response(reply.body, reply.status)
    else:
        response = StreamingResponse(reply.body, reply.status)
    for name, value in reply.headers:
        response.headers.append(name, value)
    return response


class FastapiWorld(AsgiWorld):
    """A route that is guarded by a dependency, after the app's own login."""

    def guard(self, shop: Shop, scope: Whose, policy: Policy, paths: Paths) -> Send:
        assert paths is None, "A route says for itself that it is guarded."
        app = FastAPI(openapi_url=None)
        install(app, store=self.store, policy=policy)

        def current_account(request: FastapiRequest) -> str | None:
            if shop.is_locked:
                raise HTTPException(401, "Who are you?")
            return scope(RequestView.of(head_of(request.scope), full_path(request.scope), request.scope))

        @app.exception_handler(401)
        def plain(_request: FastapiRequest, error: Exception) -> PlainTextResponse:
            assert isinstance(error, HTTPException)
            return PlainTextResponse(error.detail, 401)

        @app.api_route("/pay", methods=METHODS)
        @app.api_route("/pay/{rest:path}", methods=METHODS)
        async def endpoint(
            request: FastapiRequest,
            operation: Annotated[Operation | None, Depends(Idempotent(scope=current_account))],
        ) -> Response:
            return answer_of(await asyncio.to_thread(shop, request.method, request.url.path, await request.body()))

        return lambda request: self.submit(call_asgi(app, request))


class LitestarWorld(AsgiWorld):
    """A Litestar app, guarded as a whole."""

    def guard(self, shop: Shop, scope: Whose, policy: Policy, paths: Paths) -> Send:
        async def endpoint(request: LitestarRequest[Any, Any, Any]) -> Response:
            return answer_of(await asyncio.to_thread(shop, request.method, request.url.path, await request.body()))

        handlers: list[ControllerRouterHandler] = [
            HTTPRouteHandler(["/pay", "/pay/{rest:path}"], http_method=LITESTARS_METHODS)(endpoint)  # type: ignore[arg-type]
        ]
        app = IdempotencyMiddleware(
            cast("ASGIApp", Litestar(handlers)), store=self.store, scope=scope, policy=policy, paths=paths
        )

        async def authenticated(scope: Any, receive: Any, send: Any) -> None:
            if shop.is_locked:
                await PlainTextResponse("Who are you?", 401)(scope, receive, send)
            else:
                await app(scope, receive, send)

        return lambda request: self.submit(call_asgi(authenticated, request))
