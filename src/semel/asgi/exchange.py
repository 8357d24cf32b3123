"""One guarded request of an ASGI app, up to the point where its handler runs. ``flows/serve`` says in what order."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from semel.asgi.handling import Handling, Job, Taken
from semel.asgi.protocol import (
    EXCHANGE,
    WHOLE_APP,
    ASGIApp,
    ASGIScope,
    ASGISend,
    Receive,
    full_path,
    head_of,
    hide_extensions,
    send_answer,
)
from semel.asgi.stored import nowhere, silence
from semel.core.commands import (
    Begin,
    Command,
    Finish,
    Flow,
    NameScope,
    NotStarted,
    Pause,
    ReadBody,
    RunHandler,
    Tell,
    Undo,
)
from semel.core.fingerprint import Buffer
from semel.core.message import Request
from semel.core.policy import Policy
from semel.core.record import Stuck
from semel.door import Body, Gate, RequestView, declared_length
from semel.drivers import aresume, arun
from semel.errors import Interrupted
from semel.flows.finish import finish
from semel.flows.reply import Send
from semel.flows.serve import serve
from semel.operation import Operation
from semel.stage import AsyncStage
from semel.stores import AsyncStore
from semel.stores.keeper import AsyncKeeper
from semel.stores.transaction import AsyncTransaction
from semel.telemetry.logs import log


@dataclass(frozen=True, slots=True)
class Guard:
    """What the requests of one app share."""

    app: ASGIApp
    store: AsyncStore
    keeper: AsyncKeeper
    gate: Gate
    #: Says whose request it is.
    scope: Callable[[RequestView], Any]


class Exchange:
    """Takes one request from its headers to its handler, or to an answer that needs none."""

    def __init__(self, guard: Guard, policy: Policy) -> None:
        """Guard one request to an app by *policy*."""
        self._guard = guard
        self._store = guard.store
        self._policy = policy
        self._body = Body()
        self._transaction: AsyncTransaction | None = None

    async def serve(self, scope: ASGIScope, receive: Receive, send: ASGISend) -> None:
        """Serve the request that the server describes."""
        self._scope = scope
        self._receive = receive
        self._head = head_of(scope)
        flow = serve(self._head, self._policy, os.urandom(16), notes_replays=self._store.notes_replays)
        try:
            reached = await arun(flow, self._perform, until=RunHandler)
        except Interrupted:
            # The client went away before it had sent the whole request: there is nobody to answer, and nothing to do.
            self._body.close()
            return
        except BaseException:
            self._body.close()
            raise
        if isinstance(reached, RunHandler) and not self._guard.gate.is_closed:
            await self._handle(flow, reached, send)
            return
        self._body.close()
        if isinstance(reached, RunHandler):
            reached = await aresume(flow, NotStarted(), self._perform)
        if isinstance(reached, Send):
            await send_answer(send, reached.answer, is_ours=True)
        else:
            await self._guard.app(scope, receive, send)

    async def finish(self, stuck: Stuck, request: Request, scope: ASGIScope) -> None:
        """Run a stored *request* again, on from where it is stuck. Nobody waits for the answer: it is stored."""
        self._scope = scope
        self._receive = silence
        self._head = request.head
        self._body.add(request.body)
        flow = finish(stuck, self._policy, os.urandom(16))
        reached = await arun(flow, self._perform, until=RunHandler)
        if isinstance(reached, RunHandler):
            await self._handle(flow, reached, nowhere)
        else:
            self._body.close()

    async def _handle(self, flow: Flow[Any], command: RunHandler, send: ASGISend) -> None:
        hide_extensions(self._scope)
        self._scope[EXCHANGE] = WHOLE_APP
        handling = Handling(self._perform, self._guard.keeper)
        handling.hold_back(Job(flow, command, self._operation(command)))
        try:
            await handling.start(self._guard.app, self._scope, Taken(self._body, self._receive), send)
        except asyncio.CancelledError:
            handling.desert()
            raise

    def _operation(self, command: RunHandler) -> Operation:
        stage = None if self._transaction else AsyncStage(self._store)
        return Operation(command.hold, command.progress, stage=stage, transaction=self._transaction)

    def _perform(self, command: Command[Any]) -> Any:
        perform = self.performs.get(type(command))
        return perform(self, command) if perform else self._store.perform(command)

    def name_scope(self, _command: NameScope) -> Any:
        """Ask the application whose request this is."""
        self._guard.gate.check()
        return self._guard.scope(RequestView.of(self._head, full_path(self._scope), self._scope))

    async def begin(self, command: Begin) -> Any:
        """Open the transaction that the handler will write in."""
        self._transaction = self._store.transaction()
        return await self._transaction.perform(command)

    async def end(self, command: Command[Any]) -> Any:
        """End it."""
        if self._transaction is None:  # It could not be opened, and there is none to undo.
            return None
        return await self._transaction.perform(command)

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

    #: How an exchange carries out the commands that are not the store's.
    performs: ClassVar[dict[type[Command[Any]], Callable[[Any, Any], Any]]] = {
        NameScope: name_scope,
        ReadBody: read_body,
        Begin: begin,
        Finish: end,
        Undo: end,
        Pause: lambda _, command: asyncio.sleep(command.duration.total_seconds()),
        Tell: lambda _, command: log(command.happening),
    }
