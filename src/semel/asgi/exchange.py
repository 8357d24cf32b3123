"""One guarded request of an ASGI app, up to the point where its handler runs. ``flows/serve`` says in what order."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any

from semel.asgi.handling import Handling
from semel.asgi.protocol import (
    ASGIApp,
    ASGIScope,
    ASGISend,
    Receive,
    full_path,
    head_of,
    hide_extensions,
    send_answer,
)
from semel.core.commands import Command, NameScope, Pause, ReadBody, RunHandler, Tell
from semel.core.fingerprint import Buffer
from semel.core.policy import Policy
from semel.door import Body, RequestView, declared_length
from semel.drivers import arun
from semel.errors import Interrupted
from semel.flows.serve import Send, serve
from semel.stores import AsyncStore
from semel.stores.keeper import AsyncKeeper
from semel.telemetry.logs import log


class Exchange:
    """Takes one request from its headers to its handler, or to an answer that needs none."""

    def __init__(
        self, app: ASGIApp, store: AsyncStore, keeper: AsyncKeeper, whose: Callable[[RequestView], Any], policy: Policy
    ) -> None:
        """Guard one request to *app* by *policy*."""
        self._app = app
        self._store = store
        self._keeper = keeper
        self._whose = whose
        self._policy = policy
        self._body = Body()

    async def serve(self, scope: ASGIScope, receive: Receive, send: ASGISend) -> None:
        """Serve the request that the server describes."""
        self._scope = scope
        self._receive = receive
        self._head = head_of(scope)
        flow = serve(self._head, self._policy, os.urandom(16))
        try:
            reached = await arun(flow, self._perform, until=RunHandler)
        except Interrupted:
            # The client went away before it had sent the whole request: there is nobody to answer, and nothing to do.
            self._body.close()
            return
        except BaseException:
            self._body.close()
            raise
        if isinstance(reached, RunHandler):
            await self._handle(Handling(flow, reached, self._perform, self._keeper, scope), send)
            return
        self._body.close()
        if isinstance(reached, Send):
            await send_answer(send, reached.answer, is_ours=True)
        else:
            await self._app(scope, receive, send)

    async def _handle(self, handling: Handling, send: ASGISend) -> None:
        hide_extensions(self._scope)
        try:
            await handling.start(self._app, self._body, self._receive, send)
        except asyncio.CancelledError:
            handling.desert()
            raise

    def _perform(self, command: Command[Any]) -> Any:
        perform = _PERFORM.get(type(command))
        return perform(self, command) if perform else self._store.perform(command)

    def name_scope(self, _command: NameScope) -> Any:
        """Ask the application whose request this is."""
        return self._whose(RequestView.of(self._head, full_path(self._scope), self._scope))

    async def read_body(self, command: ReadBody) -> Buffer | None:
        """Read the whole body, while it is within the limit."""
        if declared_length(self._head) > command.limit:
            return None
        body = self._body
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise Interrupted
            body.add(message.get("body", b""))
            if body.size > command.limit:
                return None
            if not message.get("more_body", False):
                return body.buffer()


# How an exchange carries out the commands that are not the store's.
_PERFORM: dict[type[Command[Any]], Callable[[Exchange, Any], Any]] = {
    NameScope: Exchange.name_scope,
    ReadBody: Exchange.read_body,
    Pause: lambda _, command: asyncio.sleep(command.duration.total_seconds()),
    Tell: lambda _, command: log(command.happening),
}
