"""One guarded request of an ASGI app, up to the point where its handler runs. ``flows/serve`` says in what order."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any, ClassVar

from semel.asgi import watching
from semel.asgi.handling import Handling, Job, Taken
from semel.asgi.line import Line
from semel.asgi.protocol import (
    EXCHANGE,
    OPERATION,
    STORED,
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
from semel.asgi.watching import Rejoined, Watch
from semel.core.commands import (
    Flow,
    Lost,
    NameScope,
    ReadBody,
    RunHandler,
    RunUnguarded,
    Wait,
)
from semel.core.fingerprint import Buffer
from semel.core.message import Answer, Request
from semel.core.policy import Policy
from semel.core.record import Stuck
from semel.core.status import mounted_path
from semel.door import Body, RequestView, declared_length, nobody
from semel.drivers import aresume, arun
from semel.errors import Interrupted
from semel.exchange import AsyncGuard, AsyncHands, Performs
from semel.flows.finish import finish, run_stored
from semel.flows.reply import PassOn, Send
from semel.flows.serve import serve
from semel.operation import around, enter
from semel.stores.keeper import AsyncKeeper

#: As a plain number: every replay is compared with it, and an enumeration's members are slow to get.
_ACCEPTED = int(HTTPStatus.ACCEPTED)


@dataclass(frozen=True, slots=True, kw_only=True)
class AppGuard(AsyncGuard):
    """What the requests of one app share."""

    keeper: AsyncKeeper
    app: ASGIApp
    #: Says whose request it is.
    scope: Callable[[RequestView], Any]
    #: Has the workers of this process look for what was accepted, where it has any.
    hurry: Callable[[], None] = nobody


class Exchange(AsyncHands):
    """Takes one request from its headers to its handler, or to an answer that needs none."""

    guard: AppGuard

    def __init__(self, guard: AppGuard, policy: Policy) -> None:
        """Guard one request to an app by *policy*."""
        super().__init__(guard)
        self.is_reporting = policy.enforcement == "report"
        self._policy = policy
        self._body = Body()
        #: All of it was read; or not, because the client hung up.
        self._body_is_whole = self._body_is_cut = False
        #: To a client that is kept waiting.
        self._line: Line | None = None

    async def serve(self, scope: ASGIScope, receive: Receive, send: ASGISend) -> None:
        """Serve the request that the server describes."""
        self._scope = scope
        self._receive = receive
        self._head = head_of(scope)
        flow = serve(
            self._head,
            self._policy,
            os.urandom(16),
            notes_replays=self.guard.store.notes_replays,
            status_path=self.status_path,
            around=around(),
        )
        if self._policy.enforcement == "report":
            await self._let_through(flow, Watch(send, self.perform, self.guard.keeper))
            return
        try:
            await self._answer(flow, send)
        finally:
            if self._line is not None:
                self._line.close()

    async def _answer(self, flow: Flow[Any], send: ASGISend) -> None:
        try:
            reached = await self.reach(flow)
        except Interrupted:
            # The client went away before it had sent the whole request, or while it was kept waiting: there is nobody
            # to answer, and nothing to do.
            self._body.close()
            return
        except BaseException:
            self._body.close()
            raise
        if isinstance(reached, RunHandler):
            await self._handle(flow, reached, send)
            return
        try:
            if isinstance(reached, Send):
                self.call_worker(reached.answer)
                await send_answer(send, reached.answer, is_ours=True)
            elif isinstance(reached, PassOn) and reached.unrecorded is not None:
                with enter(self.unrecorded(reached.unrecorded)):
                    await self.guard.app(self._scope, self._rejoined(), send)
            else:
                await self.guard.app(self._scope, self._rejoined(), send)
        finally:
            self._body.close()

    async def _let_through(self, flow: Flow[Any], watch: Watch) -> None:
        """Let the application answer as if we were not here."""
        try:
            try:
                reached = await arun(flow, self.perform, until=RunUnguarded)
            except Interrupted:
                reached = None  # The client went away before it had sent the whole request, as the app will see.
            if isinstance(reached, RunUnguarded):
                watch.begin(watching.Job(flow, reached))
            await watch.run(self.guard.app, self._scope, self._rejoined())
        finally:
            self._body.close()

    def _rejoined(self) -> Receive:
        """Return what the app receives by where it is not guarded: all of its body, whatever was read of it here."""
        if self._body_is_whole or self._body_is_cut or self._body.size:
            return Rejoined(self._body, self._receive, is_whole=self._body_is_whole, is_cut=self._body_is_cut)
        return self._receive

    @property
    def status_path(self) -> str | None:
        """Where this client can ask for the state of operations."""
        return mounted_path(self._head.mount, self.guard.status_path)

    def call_worker(self, answer: Answer) -> None:
        """Have a worker look at once, where *answer* tells that a request was accepted."""
        if answer.status == _ACCEPTED:
            self.guard.hurry()

    async def finish(self, stuck: Stuck, request: Request, scope: ASGIScope) -> bool:
        """Run a stored *request* again, on from where it is stuck; False: somebody else was quicker.

        Nobody waits for the answer: it is stored.
        """
        self._scope = scope
        self._receive = silence
        self._head = request.head
        self._body.add(request.body)
        flow = finish(stuck, self._policy, os.urandom(16))
        reached = await arun(flow, self.perform, until=RunHandler)
        if isinstance(reached, RunHandler) and not await self.is_held(reached):
            reached = await aresume(flow, Lost(), self.perform)
        if isinstance(reached, RunHandler):
            try:
                await self._handle(flow, reached, nowhere, stuck)
            finally:
                # Each would hold the other until the garbage collector comes.
                scope.pop(STORED, None)
        else:
            self._body.close()
        return reached is not None

    async def _handle(self, flow: Flow[Any], command: RunHandler, send: ASGISend, stuck: Stuck | None = None) -> None:
        hide_extensions(self._scope)
        self._scope[EXCHANGE] = WHOLE_APP
        handling = Handling(self.perform, self.guard)
        operation = self._scope[OPERATION] = self.operation(command)
        handling.hold_back(Job(flow, command, operation))
        if stuck is not None:
            self._scope[STORED] = partial(self._judge_by, handling, stuck)
        try:
            await handling.start(self.guard.app, self._scope, Taken(self._body, self._receive), send)
        except asyncio.CancelledError:
            handling.desert()
            raise

    async def _judge_by(self, handling: Handling, stuck: Stuck, policy: Policy) -> None:
        """Go on by *policy*, that of the route which a stored request has come to."""
        job = handling.job
        if job is None or handling.is_concluded:
            return
        flow = run_stored(stuck, job.command.hold, job.command.progress, policy)
        command = await arun(flow, self.perform, until=RunHandler)
        if isinstance(command, RunHandler):
            handling.hold_back(Job(flow, command, job.operation))

    def name_scope(self, _command: NameScope) -> Any:
        """Ask the application whose request this is."""
        self.guard.gate.check()
        return self.guard.scope(RequestView.of(self._head, full_path(self._scope), self._scope))

    async def read_body(self, command: ReadBody) -> Buffer | None:
        """Read the whole body, while it is within the limit."""
        if declared_length(self._head) > command.limit:
            return None
        body = self._body
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self._body_is_cut = True
                raise Interrupted
            body.add(message.get("body", b""))
            self._body_is_whole = not message.get("more_body", False)
            if body.size > command.limit:
                return None
            if self._body_is_whole:
                return body.buffer()

    async def wait(self, command: Wait) -> Any:
        """Wait for another request to end, unless the client hangs up."""
        if self._line is None:
            self._line = self.open_line()
            self._line.listen(self.leave)
        return await super().wait(command)

    def open_line(self) -> Line:
        """Have a line to the client. Its whole request was read."""
        self._receive = line = Line(self._receive)
        return line

    performs: ClassVar[Performs] = {**AsyncHands.performs, NameScope: name_scope, ReadBody: read_body, Wait: wait}
