"""Django behind ``tests.web.harness``: one shop behind a plain view, an async one, REST framework's, and behind
the middleware. Each request brings its own URLs, so that each test has its own view and policy in the one project.
"""

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from asgiref.sync import sync_to_async
from django.core.handlers.asgi import ASGIHandler
from django.core.handlers.wsgi import WSGIHandler
from django.core.signals import got_request_exception
from django.http import HttpResponse, StreamingHttpResponse
from django.test import override_settings
from django.urls import path
from rest_framework.renderers import BaseRenderer
from rest_framework.response import Response as RestResponse
from rest_framework.views import APIView

from semel import Policy
from semel.core.commands import Command
from semel.django import IdempotencyMiddleware, conf, idempotent
from semel.django.rest import IdempotentMixin
from semel.guard.request import Paths, RequestView
from tests.web.harness import (
    METHODS,
    AsgiWorld,
    Reply,
    Request,
    Response,
    Send,
    Shop,
    call_asgi,
    serve_wsgi,
    wsgi_environ,
)

SHOP = "tests.shop"
URLS = "tests.urls"
POLICY = "tests.policy"
SCOPE = "tests.scope"
ERRORS = "tests.errors"

Scope = Callable[[RequestView], str | None]


def raw(request: Any) -> Any:
    """What the server made of the request."""
    return request.scope if hasattr(request, "scope") else request.META


def refused(request: Any) -> Any:
    """As an authentication in front of everything does."""
    return HttpResponse("Who are you?", status=401) if raw(request)[SHOP].is_locked else None


def own_urls(get_response: Any) -> Any:
    """Middleware that lets requests in, and serves the URLs which they bring."""

    def serve(request: Any) -> Any:
        request.urlconf = raw(request)[URLS]
        return refused(request) or get_response(request)

    async def aserve(request: Any) -> Any:
        request.urlconf = raw(request)[URLS]
        return refused(request) or await get_response(request)

    return aserve if asyncio.iscoroutinefunction(get_response) else serve


own_urls.sync_capable = own_urls.async_capable = True  # type: ignore[attr-defined]  # as Django wants it


def note(request: Any, **_: Any) -> None:
    errors = raw(request).get(ERRORS)
    if errors is not None:
        errors.append(sys.exc_info()[1])


got_request_exception.connect(note)


def to_lines(response: Any, reply: Reply) -> Any:
    """Put the headers of *reply* on *response*, which has one line for each name, and its cookies elsewhere."""
    del response["Content-Type"]
    for name, value in reply.headers:
        if name == "set-cookie":
            response.cookies.load(value)
        else:
            response[name] = f"{response[name]}, {value}" if name in response else value
    return response


def django_response(reply: Reply) -> Any:
    if isinstance(reply.body, bytes):
        return to_lines(HttpResponse(reply.body, status=reply.status), reply)
    return to_lines(StreamingHttpResponse(reply.body, status=reply.status), reply)


async def each(parts: Iterable[bytes]) -> AsyncIterator[bytes]:
    iterator = iter(parts)
    # Not on the loop: a test may hold it up.
    while (part := await sync_to_async(lambda: next(iterator, None), thread_sensitive=False)()) is not None:
        yield part


def async_response(reply: Reply) -> Any:
    if isinstance(reply.body, bytes):
        return django_response(reply)
    return django_response(Reply(reply.status, each(reply.body), reply.headers))  # type: ignore[arg-type]  # Django takes either


class Urls:
    """What Django takes for a module of URLs."""

    def __init__(self, view: Any) -> None:
        self.urlpatterns = [path("pay", view), path("pay/<path:rest>", view)]


class DjangoWorld:
    """A plain view that is decorated, through Django's WSGI handler, on a few threads."""

    middleware: tuple[str, ...] = (f"{__name__}.own_urls",)

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(12)
        with override_settings(MIDDLEWARE=self.middleware):
            self._handler = WSGIHandler()

    def guard(self, shop: Shop, scope: Scope, policy: Policy, _paths: Paths) -> Send:
        more = {SHOP: shop, URLS: Urls(self.view(shop, scope, policy)), POLICY: policy, SCOPE: scope}
        return lambda request: self._threads.submit(self._call, request, more)

    def view(self, shop: Shop, scope: Scope, policy: Policy) -> Any:
        @idempotent(policy=policy, scope=scope)
        def view(request: Any, **_: Any) -> Any:
            return django_response(shop(request.method, request.path, request.body))

        return view

    def perform(self, command: Command[Any]) -> Any:
        return conf.store().perform(command)

    def close(self) -> None:
        self._threads.shutdown()

    def _call(self, request: Request, more: dict[str, Any]) -> Response:
        errors: list[BaseException] = []
        return told(serve_wsgi(self._handler, {**wsgi_environ(request), **more, ERRORS: errors}), errors)


def told(response: Response, errors: list[BaseException]) -> Response:
    """The response as a client sees it, with what Django told of it."""
    headers = tuple((name, value.strip()) for name, value in response.headers)
    return Response(response.status, headers, response.body, errors[0] if errors else response.error)


class AsyncDjangoWorld(AsgiWorld):
    """An async view that is decorated, through Django's ASGI handler."""

    middleware: tuple[str, ...] = (f"{__name__}.own_urls",)

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()
        with override_settings(MIDDLEWARE=self.middleware):
            self._handler = ASGIHandler()

    def guard(self, shop: Shop, scope: Scope, policy: Policy, _paths: Paths) -> Send:
        more = {SHOP: shop, URLS: Urls(self.view(shop, scope, policy)), POLICY: policy, SCOPE: scope}
        return lambda request: self.submit(self._call(request, more))

    def view(self, shop: Shop, scope: Scope, policy: Policy) -> Any:
        @idempotent(policy=policy, scope=scope)
        async def view(request: Any, **_: Any) -> Any:
            return async_response(
                await sync_to_async(shop, thread_sensitive=False)(request.method, request.path, request.body)
            )

        return view

    def perform(self, command: Command[Any]) -> Any:
        return conf.store().perform(command)

    async def _call(self, request: Request, more: dict[str, Any]) -> Response:
        errors: list[BaseException] = []
        return told(await call_asgi(self._handler, request, **more, **{ERRORS: errors}), errors)

    def close(self) -> None:
        self.submit(self.loop.shutdown_default_executor()).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class AsItIs(BaseRenderer):  # type: ignore[misc]  # REST framework has no types
    media_type = "*/*"
    charset = None

    def render(self, data: Any, *_: Any, **__: Any) -> Any:
        return data


class DrfWorld(DjangoWorld):
    """A view of REST framework's."""

    def view(self, shop: Shop, scope: Scope, policy: Policy) -> Any:
        def handle(_view: Any, request: Any, **_: Any) -> Any:
            reply = shop(request.method, request.path, request.body)
            if not isinstance(reply.body, bytes):
                return django_response(reply)
            headers = {name: value for name, value in reply.headers if name not in {"content-type", "set-cookie"}}
            content_type = dict(reply.headers).get("content-type")
            response = RestResponse(reply.body, reply.status, headers=headers, content_type=content_type)
            for name, value in reply.headers:
                if name == "set-cookie":
                    response.cookies.load(value)
            return response

        body: dict[str, Any] = {
            "http_method_names": [method.lower() for method in METHODS],
            "authentication_classes": [],
            "permission_classes": [],
            "renderer_classes": [AsItIs],
            "idempotency_policy": policy,
            "get_idempotency_scope": lambda _view, request: scope(request),
        }
        handlers = dict.fromkeys(body["http_method_names"], handle)
        kind: Any = type("ShopView", (IdempotentMixin, APIView), body | handlers)
        return kind.as_view()


class Chosen(IdempotencyMiddleware):
    """The middleware, with the policy that the request brings."""

    def policy_for(self, request: Any) -> Policy | None:
        policy: Policy = raw(request)[POLICY]
        return policy if request.method in policy.methods else None


def brought_scope(request: Any) -> str | None:
    scope: Scope = raw(request)[SCOPE]
    return scope(request)


class MiddlewareWorld(DjangoWorld):
    """A plain view that knows of nothing, behind the middleware. SEMEL["SCOPE"] has to be ``brought_scope``."""

    middleware = (*DjangoWorld.middleware, f"{__name__}.Chosen")

    def view(self, shop: Shop, _scope: Scope, _policy: Policy) -> Any:
        def view(request: Any, **_: Any) -> Any:
            return django_response(shop(request.method, request.path, request.body))

        return view


class AsyncMiddlewareWorld(AsyncDjangoWorld):
    """The same with an async view, through Django's ASGI handler."""

    middleware = (*AsyncDjangoWorld.middleware, f"{__name__}.Chosen")

    def view(self, shop: Shop, _scope: Scope, _policy: Policy) -> Any:
        async def view(request: Any, **_: Any) -> Any:
            return async_response(
                await sync_to_async(shop, thread_sensitive=False)(request.method, request.path, request.body)
            )

        return view
