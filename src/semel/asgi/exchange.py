"""One guarded request of an ASGI app, and its response. ``flows/serve`` says in what order."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any

from semel.asgi.protocol import ASGIApp, ASGIScope, ASGISend, Receive, full_path, head_of, hide_extensions
from semel.asgi.response import Answering, Replayed, Response
from semel.core.commands import Command, Flow, NameScope, Pause, ReadBody, RunHandler, Tell
from semel.core.fingerprint import Buffer
from semel.core.message import Answer, Head
from semel.core.policy import Policy
from semel.core.record import Hold
from semel.door import Body, RequestView, declared_length, framed
from semel.drivers import arun
from semel.errors import Interrupted
from semel.flows.serve import PassOn, Reply, Reraise, Send, serve
from semel.operation import Operation
from semel.stores import AsyncStore
from semel.stores.keeper import AsyncKeeper
from semel.stores.step import Step
from semel.telemetry.logs import log


class Exchange:
    """Takes one request from its headers to its answer."""

    _head: Head
    _raw: ASGIScope
    _receive: Receive
    _send: ASGISend

    def __init__(
        self, app: ASGIApp, store: AsyncStore, keeper: AsyncKeeper, whose: Callable[[RequestView], Any], policy: Policy
    ) -> None:
        """Guard one request to *app* by *policy*."""
        self._app = app
        self._store = store
        self._keeper = keeper
        self._whose = whose
        self._policy = policy
        self._body: Body | None = None
        self._hold: Hold | None = None
        self._response: Response | None = None
        self._is_decided = False
        self._is_abandoned = False

    async def serve(self, scope: ASGIScope, receive: Receive, send: ASGISend) -> None:
        """Serve the request that the server describes."""
        self._raw, self._receive, self._send = scope, receive, send
        self._head = head_of(scope)
        try:
            reply = await arun(self._flow(), self._perform)
            await self._give(reply)
        except Interrupted:
            # The client went away before it had sent the whole request: there is nobody to answer, and nothing to do.
            return
        except BaseException:
            self._is_abandoned = True
            self._release_app()
            raise
        finally:
            if self._body is not None:
                if self._response is None:
                    self._body.close()
                else:
                    # A handler that runs on behind a client that left may not have read it yet.
                    self._response.when_app_ends(self._body.close)

    def _flow(self) -> Flow[Reply]:
        try:
            return (yield from serve(self._head, self._policy, os.urandom(16)))
        finally:
            # Whatever became of it, a lease that nobody works under must be able to run out.
            if self._hold is not None:
                self._keeper.discard(self._hold)
            self._is_decided = True
            self._release_app()

    def _release_app(self) -> None:
        # The flow goes on behind a server that left. Only when both are through has the app nobody to wait for.
        if self._is_abandoned and self._is_decided and self._response is not None:
            self._response.release()

    def _perform(self, command: Command[Any]) -> Any:
        perform = _PERFORM.get(type(command))
        return perform(self, command) if perform else self._store.perform(command)

    def name_scope(self, _command: NameScope) -> Any:
        """Ask the application whose request this is."""
        return self._whose(RequestView.of(self._head, full_path(self._raw), self._raw))

    async def read_body(self, command: ReadBody) -> Buffer | None:
        """Read the whole body, while it is within the limit."""
        if declared_length(self._head) > command.limit:
            return None
        body = self._body = Body()
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise Interrupted
            body.add(message.get("body", b""))
            if body.size > command.limit:
                return None
            if not message.get("more_body", False):
                return body.buffer()

    def run_handler(self, command: RunHandler) -> Step[Answering]:
        """Run the app beside the flow."""
        self._hold = command.hold
        self._keeper.add(command.hold, command.lease)
        hide_extensions(self._raw)
        response = self._response = Response(Operation(command.hold), self._raw, self._send, command.limit)
        response.start(self._app, Replayed(self._body or Body(), response, self._receive))
        return response.ending

    async def _give(self, reply: Reply) -> None:
        response = self._response
        match reply:
            case Send(answer):
                await self._send_answer(answer, is_ours=response is None or answer is not response.answer)
                if response is not None:
                    await response.has_been_sent(answer)
            case PassOn():
                if response is None:
                    await self._app(self._raw, self._receive, self._send)
                else:
                    await response.flow_on()
            case Reraise(error, answer):
                # The answer first, so that this client and its retries see the same. Then the error goes on to
                # whoever reports errors: they look whether a response has begun, and don't begin another.
                if answer is not None:
                    await self._send_answer(answer, is_ours=True)
                raise error

    async def _send_answer(self, answer: Answer, *, is_ours: bool) -> None:
        headers = framed(answer) if is_ours else answer.headers
        await self._send({"type": "http.response.start", "status": answer.status, "headers": list(headers)})
        await self._send({"type": "http.response.body", "body": answer.body or b""})


# How an exchange carries out the commands that are not the store's.
_PERFORM: dict[type[Command[Any]], Callable[[Exchange, Any], Any]] = {
    NameScope: Exchange.name_scope,
    ReadBody: Exchange.read_body,
    RunHandler: Exchange.run_handler,
    Pause: lambda _, command: asyncio.sleep(command.duration.total_seconds()),
    Tell: lambda _, command: log(command.happening),
}
