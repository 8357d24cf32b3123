"""Somebody who asks an ASGI app what became of an operation. What he is told, ``flows/status`` says; no handler is run.

Where a middleware guards the whole app it answers by itself. Where the routes say whose request it is, one of them has
to say so here, too: it calls ``tell``.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any, ClassVar

from semel.asgi.exchange import AppGuard, Exchange
from semel.asgi.protocol import ASGIScope, ASGISend, Receive, full_path, head_of, send_answer
from semel.core.commands import NameScope
from semel.core.message import Answer
from semel.core.policy import Policy
from semel.core.status import mounted_path
from semel.door import RequestView, bodiless
from semel.drivers import arun
from semel.errors import ConfigurationError, Interrupted
from semel.exchange import Performs
from semel.flows.status import status

#: Where a route finds who answers, in the ASGI scope.
STATUS = "semel.status"


async def tell(scope: ASGIScope, name: str, principal: object) -> Answer:
    """Return what *principal* is told of the operation *name*: for the route at the status path, after its login."""
    exchange = scope.get(STATUS)
    if not isinstance(exchange, RouteStatus):
        raise ConfigurationError(
            "Nothing around this app knows of operations: call semel.fastapi.install(app, store=…, status_scope=…)."
        )
    return await exchange.tell(name, principal)


class StatusExchange(Exchange):
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

    def name_scope(self, _command: NameScope) -> Any:
        """Ask the application whose request this is. A server that is about to stop still knows what it did."""
        return self.guard.scope(RequestView.of(self._head, full_path(self._scope), self._scope))

    def _begin(self, scope: ASGIScope, receive: Receive) -> None:
        self._scope = scope
        self._receive = receive
        self._head = head_of(scope)

    def _end(self) -> None:
        self._body.close()
        if self._line is not None:
            self._line.close()

    async def _told(self, name: str) -> Answer:
        path = mounted_path(self._head.mount, self.guard.status_path) or ""
        reply = await arun(status(self._head, name, self._policy, path), self.perform)
        return reply.answer

    performs: ClassVar[Performs] = {**Exchange.performs, NameScope: name_scope}


class RouteStatus(StatusExchange):
    """The same, where a route of the app's own says whose request it is."""

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

    async def tell(self, name: str, principal: object) -> Answer:
        """Return what *principal* is told of the operation *name*."""
        self._principal = principal
        try:
            return await self._told(name)
        except Interrupted:
            return Answer(HTTPStatus.NO_CONTENT)  # The client went away while it was kept waiting: nobody reads it.

    def name_scope(self, _command: NameScope) -> Any:
        """Say whose request this is, as the route's login did."""
        return self._principal() if callable(self._principal) else self._principal

    performs: ClassVar[Performs] = {**StatusExchange.performs, NameScope: name_scope}
