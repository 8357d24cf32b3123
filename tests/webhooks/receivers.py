"""Receivers in every framework, asked through its own test client; and an inbox that keeps nothing beyond a test.

The inbox stands in for a real one: it knows which ids it has seen, and what verdict a test wants.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import django.test
import flask
import httpx
from asgiref.sync import sync_to_async
from django.urls import path as django_path
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.routing import Route

import semel.webhooks.django
import semel.webhooks.fastapi
import semel.webhooks.flask
from semel.webhooks import WebhookEvent
from tests.django import project

project.set_up()


@dataclass(frozen=True)
class Ran:
    result: Any = None


@dataclass(frozen=True)
class Duplicate:
    pass


@dataclass(frozen=True)
class Busy:
    pass


@dataclass(frozen=True)
class Parked:
    pass


class ForThreads:
    """An inbox whose methods answer at once."""

    def __init__(self) -> None:
        self.seen: set[str] = set()
        self.verdict: Any = None
        self.payloads: list[object] = []

    def receive(self, message_id: str, handler: Callable[..., Any], /, *args: Any, payload: object = None) -> Any:
        self.payloads.append(payload)
        if self.verdict is not None:
            return self.verdict
        if message_id in self.seen:
            return Duplicate()
        result = handler("a connection", *args)
        self.seen.add(message_id)
        return Ran(result)


class ForLoops(ForThreads):
    """An inbox whose methods are awaited."""

    async def receive(self, message_id: str, handler: Callable[..., Any], /, *args: Any, payload: object = None) -> Any:
        self.payloads.append(payload)
        if self.verdict is not None:
            return self.verdict
        if message_id in self.seen:
            return Duplicate()
        result = handler("a connection", *args)
        if asyncio.iscoroutine(result):
            result = await result
        self.seen.add(message_id)
        return Ran(result)


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes


Post = Callable[[dict[str, str], bytes], Any]


class World:
    """One framework, with a handler that notes what it gets."""

    decorator: Any = semel.webhooks.fastapi.webhook
    is_async = True
    inbox_kind: type[ForThreads] = ForLoops

    def __init__(self) -> None:
        self.inbox = self.inbox_kind()
        self.handled: list[tuple[Any, WebhookEvent]] = []
        self.error: Exception | None = None

    def view(self, *, with_inbox: bool = True, **settings: Any) -> Any:
        """Return the decorated handler."""

        def note(*args: Any) -> None:
            if self.error is not None:
                raise self.error
            connection, event = args if with_inbox else (None, *args)
            self.handled.append((connection, event))

        async def note_async(*args: Any) -> None:
            await asyncio.sleep(0)
            note(*args)

        given = (self.inbox,) if with_inbox else ()
        return type(self).decorator(*given, **settings)(note_async if self.is_async else note)

    @asynccontextmanager
    async def serving(self, view: Any) -> AsyncIterator[Post]:
        """Serve *view*, and yield how to post to it."""
        transport = httpx.ASGITransport(self.app(view), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:

            async def post(headers: dict[str, str], body: bytes) -> Answer:
                answer = await client.post("/hooks", content=body, headers=headers)
                return Answer(answer.status_code, dict(answer.headers), answer.content)

            yield post

    def app(self, view: Any) -> Any:
        app = FastAPI()
        app.post("/hooks")(view)
        return app


class FastAPIWorld(World):
    pass


class PlainFastAPI(World):
    """A plain handler and an inbox for threads, in an app on an event loop."""

    is_async = False
    inbox_kind = ForThreads


class StarletteWorld(World):
    def app(self, view: Any) -> Any:
        return Starlette(routes=[Route("/hooks", view, methods=["POST"])])


class FlaskWorld(World):
    decorator = semel.webhooks.flask.webhook
    is_async = False
    inbox_kind = ForThreads

    @asynccontextmanager
    async def serving(self, view: Any) -> AsyncIterator[Post]:
        app = flask.Flask("receiver")
        app.post("/hooks")(view)

        async def post(headers: dict[str, str], body: bytes) -> Answer:
            answer = await asyncio.to_thread(lambda: app.test_client().post("/hooks", data=body, headers=headers))
            return Answer(answer.status_code, {k.lower(): v for k, v in answer.headers.items()}, answer.data)

        yield post


class AsyncFlask(FlaskWorld):
    is_async = True


class DjangoWorld(World):
    decorator = semel.webhooks.django.webhook
    is_async = False
    inbox_kind = ForThreads

    @asynccontextmanager
    async def serving(self, view: Any) -> AsyncIterator[Post]:
        client = django.test.Client(enforce_csrf_checks=True, raise_request_exception=False)
        middleware = ["django.middleware.csrf.CsrfViewMiddleware"]
        with project.serving([django_path("hooks", view)], MIDDLEWARE=middleware):

            async def post(headers: dict[str, str], body: bytes) -> Answer:
                ask = sync_to_async(client.post)
                answer = await ask("/hooks", body, content_type="application/json", headers=headers)
                return Answer(answer.status_code, {k.lower(): v for k, v in answer.headers.items()}, answer.content)

            yield post


class AsyncDjango(DjangoWorld):
    is_async = True
    inbox_kind = ForLoops

    @asynccontextmanager
    async def serving(self, view: Any) -> AsyncIterator[Post]:
        client = django.test.AsyncClient(enforce_csrf_checks=True, raise_request_exception=False)
        with project.serving([django_path("hooks", view)], MIDDLEWARE=["django.middleware.csrf.CsrfViewMiddleware"]):

            async def post(headers: dict[str, str], body: bytes) -> Answer:
                answer = await client.post("/hooks", body, content_type="application/json", headers=headers)
                return Answer(answer.status_code, {k.lower(): v for k, v in answer.headers.items()}, answer.content)

            yield post


WORLDS = [FastAPIWorld, PlainFastAPI, StarletteWorld, FlaskWorld, AsyncFlask, DjangoWorld, AsyncDjango]
