"""A client that asks an ASGI app for the state of an operation. ``flows/status`` says what it is told; nothing is run.

Where a middleware guards the whole app it answers by itself. Where the routes name the user, one of them has
to say so here, too: it calls ``tell``.
"""

from __future__ import annotations

import inspect
from http import HTTPStatus
from typing import Any

from semel.asgi.ports import AppGuard, RequestPorts
from semel.asgi.protocol import ASGIScope, ASGISend, Receive, full_path, head_of, send_answer
from semel.core.message import Answer
from semel.core.policy import Policy
from semel.core.status import mounted_path
from semel.errors import ConfigurationError, Interrupted
from semel.flows.status import status
from semel.guard.body import bodiless
from semel.guard.request import RequestView
from semel.guard.running import arun

#: Where a route finds who answers, in the ASGI scope.
STATUS = "semel.status"


async def tell(scope: ASGIScope, name: str, principal: object) -> Answer:
    """Return what *principal* is told of the operation *name*: for the route at the status path, after its login."""
    exchange = scope.get(STATUS)
    if not isinstance(exchange, RouteStatus):
        raise ConfigurationError(
            "Nothing around this app knows of operations: call semel.fastapi.install(app, store=…, status_scope=…)."
        )
    return await exchange.state_of(name, principal)


class StatusPorts(RequestPorts):
    """One request for the state of an operation, and the answer to it."""

    def __init__(self, guard: AppGuard, policy: Policy, name: str) -> None:
        """Answer for the operation *name*, in the manner of *policy*."""
        super().__init__(guard, policy)
        self._name = name

    async def serve(self, scope: ASGIScope, receive: Receive, send: ASGISend) -> None:
        """Serve the request that the server describes."""
        self._begin(scope, receive)
        try:
            answer, is_head = await self._told(self._name), self._head.method == "HEAD"
            await send_answer(send, bodiless(answer) if is_head else answer, is_ours=not is_head)
        except Interrupted:
            pass  # The client went away while it was kept waiting.
        finally:
            self._end()

    async def principal(self) -> object:
        """Ask the application for the user of this request. A server that is about to stop still knows what it did."""
        named = self.guard.scope(RequestView.of(self._head, full_path(self._scope), self._scope))
        return await named if inspect.isawaitable(named) else named

    def _begin(self, scope: ASGIScope, receive: Receive) -> None:
        self._scope = scope
        self._receive = receive
        self._head = head_of(scope)

    def _end(self) -> None:
        self._body.close()
        if self._disconnect is not None:
            self._disconnect.close()

    async def _told(self, name: str) -> Answer:
        path = mounted_path(self._head.mount, self.guard.status_path) or ""
        reply = await arun(status, self, self._head, name, self._policy, path)
        return reply.answer


class RouteStatus(StatusPorts):
    """The same, where a route of the app's own names the user."""

    async def serve(self, scope: ASGIScope, receive: Receive, send: ASGISend) -> None:
        """Let the app come to its route."""
        self._begin(scope, receive)
        scope[STATUS] = self
        try:
            await self.guard.app(scope, receive, send)
        finally:
            # Each would hold the other until the garbage collector comes.
            scope.pop(STATUS, None)
            self._end()

    async def state_of(self, name: str, principal: object) -> Answer:
        """Return what *principal* is told of the operation *name*."""
        self._principal = principal
        try:
            return await self._told(name)
        except Interrupted:
            return Answer(HTTPStatus.NO_CONTENT)  # The client went away while it was kept waiting: this is never sent.

    async def principal(self) -> object:
        """Name the user of this request, as the route's login did."""
        named: Any = self._principal() if callable(self._principal) else self._principal
        return await named if inspect.isawaitable(named) else named
