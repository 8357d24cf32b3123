"""The ASGI door: middleware for FastAPI, Starlette, Litestar or any ASGI app. What is decided, ``flows/serve`` decides.

app = IdempotencyMiddleware(app, store="postgresql://…", scope=whose_request)
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import quote

from semel.core.commands import (
    Answered,
    Command,
    Complete,
    NameScope,
    Pause,
    Raised,
    ReadBody,
    Release,
    RunHandler,
    Streaming,
    Tell,
)
from semel.core.fingerprint import Buffer
from semel.core.message import Answer, Head, Headers
from semel.core.policy import Policy
from semel.core.replay import is_endless
from semel.door import Body, HeaderView, Paths, RequestView, Routes, checked_scope, declared_length, framed
from semel.drivers import arun
from semel.errors import ConfigurationError, Interrupted, NoEffect, StoreUnavailable
from semel.flows.serve import PassOn, Reply, Reraise, Send, serve
from semel.operation import Operation, enter
from semel.stores import AsyncStore, async_store
from semel.stores.keeper import AsyncKeeper
from semel.telemetry.logs import log, logger

ASGIScope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
ASGISend = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[ASGIScope, Receive, ASGISend], Awaitable[None]]
WhoseRequest = Callable[[RequestView], str | Awaitable[str | None] | None]

#: Ways round ``http.response.body``: an answer that takes one can't be seen, so a guarded request is not offered them.
HIDDEN_EXTENSIONS = frozenset({"http.response.pathsend", "http.response.zerocopysend", "http.response.trailers"})


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
            raise ConfigurationError(f"An ASGI app needs an AsyncStore or a URL, not {type(store).__name__}.")
        self.scope = checked_scope(scope)
        self.routes = Routes(policy or Policy.ietf(), paths)
        self.keeper = AsyncKeeper(self.store.perform)

    async def __call__(self, scope: ASGIScope, receive: Receive, send: ASGISend) -> None:
        """Serve one connection of the server's."""
        if scope["type"] == "http":
            policy = self.routes.policy_for(scope["method"], _full_path(scope))
            if policy is not None:
                await _Exchange(self, policy, scope, receive, send).serve()
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


class _Exchange:
    """One guarded request and its response."""

    def __init__(
        self, middleware: IdempotencyMiddleware, policy: Policy, scope: ASGIScope, receive: Receive, send: ASGISend
    ) -> None:
        self._middleware = middleware
        self._policy = policy
        self._scope = scope
        self._receive = receive
        self._send = send
        self._head = _head(scope)
        self._body: Body | None = None
        self._response: _Response | None = None

    async def serve(self) -> None:
        """Take the request from its headers to its answer."""
        try:
            reply = await arun(serve(self._head, self._policy, os.urandom(16)), self._perform)
            await self._give(reply)
        except Interrupted:
            # The client went away before it had sent the whole request: there is nobody to answer, and nothing to do.
            return
        except asyncio.CancelledError:
            if self._response is not None:
                self._response.nobody_listens()
            raise
        finally:
            # A handler that runs behind a client that left may not have read it yet.
            if self._body is not None and (self._response is None or self._response.has_ended):
                self._body.close()

    def _perform(self, command: Command[Any]) -> Any:
        perform = _PERFORM.get(type(command))
        return perform(self, command) if perform else self._middleware.store.perform(command)

    def name_scope(self, _command: NameScope) -> str | Awaitable[str | None] | None:
        head = self._head
        query = head.query.decode("latin-1")
        view = RequestView(head.method, _full_path(self._scope), query, HeaderView(head.headers), self._scope)
        whose: str | Awaitable[str | None] | None = self._middleware.scope(view)
        return whose

    def let_go(self, command: Complete | Release) -> asyncio.Future[Any]:
        step = self._middleware.store.perform(command)
        step.add_done_callback(lambda _: self._middleware.keeper.discard(command.hold))
        return step

    async def read_body(self, command: ReadBody) -> Buffer | None:
        limit = command.limit
        if declared_length(self._head) > limit:
            return None
        self._body = Body()
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise Interrupted
            self._body.add(message.get("body", b""))
            if self._body.size > limit:
                return None
            if not message.get("more_body", False):
                return self._body.buffer()

    def run_handler(self, command: RunHandler) -> asyncio.Future[Answered | Streaming | Raised]:
        self._middleware.keeper.add(command.hold, command.lease)
        self._response = _Response(self._send, command.limit)
        receive = _Replayed(self._body or Body(), self._response, self._receive)
        operation = Operation(command.hold)
        return self._response.start(self._call_app(operation, receive, self._response), operation, self._scope)

    async def _call_app(self, operation: Operation, receive: _Replayed, response: _Response) -> None:
        extensions = self._scope.get("extensions") or {}
        if not HIDDEN_EXTENSIONS.isdisjoint(extensions):
            kept = {name: value for name, value in extensions.items() if name not in HIDDEN_EXTENSIONS}
            self._scope["extensions"] = kept
        enter(operation)
        await self._middleware.app(self._scope, receive, response)

    async def _give(self, reply: Reply) -> None:
        response = self._response
        match reply:
            case PassOn():
                if response is None:
                    await self._middleware.app(self._scope, self._receive, self._send)
                else:
                    await response.flow_on()
            case Send(answer):
                await _send_answer(self._send, answer, is_ours=response is None or answer is not response.answer)
                if response is not None:
                    await response.has_been_sent(answer)
            case Reraise(error, answer):
                # The answer first, so that this client and its retries see the same. Then the error goes on to
                # whoever reports errors: they look whether a response has begun, and don't begin another.
                if answer is not None:
                    await _send_answer(self._send, answer, is_ours=True)
                raise error


# How an exchange carries out the commands that are not the store's.
_PERFORM: dict[type[Command[Any]], Callable[[_Exchange, Any], Any]] = {
    NameScope: _Exchange.name_scope,
    ReadBody: _Exchange.read_body,
    RunHandler: _Exchange.run_handler,
    Complete: _Exchange.let_go,
    Release: _Exchange.let_go,
    Pause: lambda _, command: asyncio.sleep(command.duration.total_seconds()),
    Tell: lambda _, command: log(command.happening),
}


class _Response:
    """The handler's answer: held back until it is stored, or let through as it comes when it can't be."""

    def __init__(self, send: ASGISend, limit: int) -> None:
        self._send = send
        self._limit = limit
        self._held: list[Message] = []
        self._size = 0
        self._is_flowing = False
        self._task: asyncio.Task[None] | None = None
        loop = asyncio.get_running_loop()
        self._ending: asyncio.Future[Answered | Streaming | Raised] = loop.create_future()
        #: Resolved when the answer has left, or never will: then what the app does after answering may begin.
        self._left: asyncio.Future[None] = loop.create_future()
        self.answer: Answer | None = None

    def start(
        self, running: Any, operation: Operation, scope: ASGIScope
    ) -> asyncio.Future[Answered | Streaming | Raised]:
        """Run the app beside the flow, and return the future of its ending."""
        self._operation = operation
        self._scope = scope
        self._task = asyncio.get_running_loop().create_task(running)
        self._task.add_done_callback(self._app_ended)
        return self._ending

    async def __call__(self, message: Message) -> None:
        """Take one message of the app's."""
        if self._is_flowing:
            await self._send(message)
            return
        match message["type"]:
            case "http.response.start":
                self._held.append(message)
                if is_endless(_lower(message.get("headers", ()))):
                    await self._stream()
            case "http.response.body":
                self._held.append(message)
                self._size += len(message.get("body", b""))
                if self._size > self._limit:
                    await self._stream()
                elif not message.get("more_body", False):
                    await self._finish()
            case _:
                # Interim answers and server extensions are about this connection, and none of them is kept.
                return

    async def wait(self) -> None:
        """Wait until the answer has left or never will."""
        await asyncio.shield(self._left)

    @property
    def is_flowing(self) -> bool:
        """Whether the answer goes straight to the client."""
        return self._is_flowing

    async def flow_on(self) -> None:
        """Let the answer through as it comes: its tombstone is stored."""
        self._is_flowing = True
        for message in self._held:
            await self._send(message)
        self._held = []
        self.nobody_listens()
        await self._app_end()

    async def has_been_sent(self, answer: Answer) -> None:
        """Let the app go on to what it does after answering; if another answer was sent instead, end it."""
        if answer is not self.answer and self._task is not None and not self._ending_is_whole():
            self._task.cancel()
        self.nobody_listens()
        await self._app_end()

    @property
    def has_ended(self) -> bool:
        """Whether the app has returned."""
        return self._task is None or self._task.done()

    def nobody_listens(self) -> None:
        """Hold the app back no longer."""
        if not self._left.done():
            self._left.set_result(None)

    def _ending_is_whole(self) -> bool:
        return self._ending.done() and not self._ending.cancelled() and isinstance(self._ending.result(), Answered)

    async def _stream(self) -> None:
        start = self._held[0]
        self._ending.set_result(Streaming(start["status"], _lower(start.get("headers", ()))))
        await self.wait()

    async def _finish(self) -> None:
        start = self._held[0]
        body = b"".join(message.get("body", b"") for message in self._held[1:])
        self.answer = Answer(start["status"], _lower(start.get("headers", ())), body)
        no_effect = self._operation.has_no_effect
        self._ending.set_result(Answered(self.answer, _reached_handler(self._scope, start["status"]), no_effect))
        # What an app does after its answer (background tasks) comes after the answer, not before it is stored.
        await self.wait()

    def _app_ended(self, task: asyncio.Task[None]) -> None:
        if self._ending.done():
            return
        if task.cancelled():
            # The loop is ending: what the handler did is not known, and its lease decides.
            self._ending.cancel()
            return
        error = task.exception() or RuntimeError("The app returned without completing its response.")
        if isinstance(error, Exception):
            no_effect = isinstance(error, NoEffect) or self._operation.has_no_effect
            self._ending.set_result(Raised(error, no_effect))
        else:
            self._ending.cancel()

    async def _app_end(self) -> None:
        if self._task is not None:
            try:
                await self._task
            except asyncio.CancelledError:
                if not self._task.cancelled():
                    raise


class _Replayed:
    """The app's ``receive``: the body that was read already, then nothing until the answer has left.

    A client that hangs up does not end a guarded request, so the app is not told of it: it would stop half-way.
    """

    def __init__(self, body: Body, response: _Response, receive: Receive) -> None:
        self._chunks = body.chunks()
        self._response = response
        self._receive = receive

    async def __call__(self) -> Message:
        for chunk, more in self._chunks:
            return {"type": "http.request", "body": chunk, "more_body": more}
        await self._response.wait()
        if self._response.is_flowing:
            return await self._receive()
        return {"type": "http.disconnect"}


async def _send_answer(send: ASGISend, answer: Answer, *, is_ours: bool) -> None:
    headers = framed(answer) if is_ours else answer.headers
    await send({"type": "http.response.start", "status": answer.status, "headers": list(headers)})
    await send({"type": "http.response.body", "body": answer.body or b""})


def _head(scope: ASGIScope) -> Head:
    raw = scope.get("raw_path")
    path = raw.decode("latin-1").partition("?")[0] if raw else quote(_full_path(scope))
    return Head(scope["method"], path, scope.get("query_string", b""), _lower(scope["headers"]))


def _full_path(scope: ASGIScope) -> str:
    root: str = scope.get("root_path", "")
    path: str = scope["path"]
    # Since ASGI 2.3 the path includes the mount point; some servers and frameworks still leave it out.
    return path if path.startswith(root) else root + path


def _lower(headers: Any) -> Headers:
    return tuple((bytes(name).lower(), bytes(value)) for name, value in headers)


def _reached_handler(scope: ASGIScope, status: int) -> bool:
    """Whether a handler saw the request. Starlette's router says which one; without a word, suppose that it did."""
    was_routed = "router" not in scope or "endpoint" in scope
    return was_routed or status not in {307, 308, 404}
