"""The ports of one guarded request of an ASGI app. ``flows/serve`` says in what order they are used."""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from datetime import timedelta
from http import HTTPStatus
from typing import Any

from semel.asgi.app_run import AppRun, Taken
from semel.asgi.disconnect import Disconnect
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
    template_of,
)
from semel.asgi.stored import nowhere, silence
from semel.asgi.watching import Rejoined, Watch
from semel.core.commands import Again
from semel.core.fingerprint import Buffer
from semel.core.handler import Ending, RunHandler, TooManyWaiters, Wait
from semel.core.message import Answer, Request
from semel.core.outcome import Door
from semel.core.policy import Policy
from semel.core.record import Found, Hold, Stuck
from semel.core.scope import SINGLE_TENANT
from semel.core.status import mounted_path
from semel.errors import Interrupted
from semel.flows.finish import finish
from semel.flows.reply import PassOn, Reply, Reraise, Send
from semel.flows.serve import serve
from semel.guard.body import Body
from semel.guard.endpoints import Templates
from semel.guard.measuring import measured
from semel.guard.ports import AsyncGuard, AsyncPorts
from semel.guard.request import RequestView
from semel.guard.running import Running, Theirs, interruptible, seen_by_flow
from semel.operation import around, enter
from semel.stores.leases import AsyncLeases

#: As a plain number: every replay is compared with it, and an enumeration's members are slow to get.
_ACCEPTED = int(HTTPStatus.ACCEPTED)


def _no_workers() -> None:
    """Wake no worker: there is none in this process."""


def _no_pattern(_path: str) -> None:
    """Know no pattern."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AppGuard(AsyncGuard):
    """What the requests of one app share."""

    leases: AsyncLeases
    app: ASGIApp
    #: Names the user of a request.
    scope: Callable[[RequestView], Any]
    #: Has the workers of this process look for what was accepted, where it has any.
    wake: Callable[[], None] = _no_workers
    #: For metrics, here and below: the entry point, and what endpoints are called.
    door: Door = "asgi"
    templates: Templates = field(default_factory=Templates)
    #: Returns the pattern by which a path is guarded, if it is by one.
    pattern: Callable[[str], str | None] = _no_pattern


class RequestPorts(AsyncPorts):
    """Takes one request from its headers to its handler, or to an answer that needs none."""

    guard: AppGuard
    #: Of the app, once it is run.
    _app_run: AppRun | None = None
    #: To a client that is kept waiting.
    _disconnect: Disconnect | None = None
    #: All of the body was read; or not, because the client hung up.
    _body_is_whole = _body_is_cut = False

    def __init__(self, guard: AppGuard, policy: Policy) -> None:
        """Guard one request to an app by *policy*."""
        super().__init__(guard, policy)
        self._policy = policy
        self._body = Body()

    async def serve(self, scope: ASGIScope, receive: Receive, send: ASGISend) -> None:
        """Serve the request that the server describes."""
        self._scope, self._receive, self._send = scope, receive, send
        self._head = head_of(scope)
        if self._policy.enforcement == "report":
            await self._let_through()
            return
        try:
            try:
                passed = await Running(self._serve(), self)
            except Interrupted:
                # The client went away before it had sent the whole request, or while it was kept waiting: there is no
                # one to answer, and nothing to do.
                return
            except asyncio.CancelledError:
                if self._app_run is not None:
                    self._app_run.detach()
                raise
            if passed is not None:
                # Out here: what an app that is not guarded waits for is its own, and it is cancelled with the server.
                await self._pass_on(passed)
        finally:
            if self._app_run is None:
                self._body.close()
            if self._disconnect is not None:
                self._disconnect.close()

    async def _serve(self) -> Reply | None:
        """Guard the request, and let the client have its answer; return what lets the app answer, unguarded."""
        try:
            reply: Reply = await self._flow()
        except Exception as error:
            if self._app_run is None:
                raise
            reply = Reraise(error, None)
        except BaseException as death:
            if self._app_run is not None and not isinstance(death, asyncio.CancelledError | GeneratorExit):
                self._app_run.kill()
            raise
        finally:
            self.let_go()
        run = self._app_run
        if run is not None:
            await run.give(reply)
            await run.done
        elif isinstance(reply, Send):
            if reply.answer.status == _ACCEPTED:
                self.guard.wake()
            await send_answer(self._send, reply.answer, is_ours=True)
        else:
            return reply
        return None

    async def _pass_on(self, reply: Reply) -> None:
        """Let the app answer by itself."""
        if isinstance(reply, PassOn) and reply.unrecorded is not None:
            with enter(self.unrecorded(reply.unrecorded)):
                await self.guard.app(self._scope, self._rejoined(), self._send)
        else:
            await self.guard.app(self._scope, self._rejoined(), self._send)

    def _flow(self) -> Coroutine[Any, Any, Reply]:
        """Return the flow of this request."""
        guard = self.guard
        return measured(serve)(
            seen_by_flow(self),
            self._head,
            self._policy,
            os.urandom(16),
            notes_replays=guard.store.notes_replays,
            # Where this client can ask for the state of operations.
            status_path=None if guard.status_path is None else mounted_path(self._head.mount, guard.status_path),
            around=around(),
        )

    @property
    def door(self) -> Door:
        """The entry point."""
        return self.guard.door

    def endpoint(self) -> str | None:
        """Return the route's template, or the pattern by which its path is guarded."""
        guard = self.guard
        template = template_of(self._scope)
        if template is not None:
            guard.templates.learn(template)
        else:
            path = full_path(self._scope)
            template = guard.templates.find(path) or guard.pattern(path)
        return None if template is None else f"{self._head.method} {template}"

    async def _let_through(self) -> None:
        """Let the application answer as if we were not here."""
        watch = self._watch = Watch(self._send, self.guard.leases)
        watch.begin(Running(self._flow(), self))
        try:
            await watch.is_reached()
            await watch.run(self.guard.app, self._scope, self._rejoined())
        finally:
            self._body.close()

    def run_unguarded(self, hold: Hold | None, lease: timedelta | None) -> Any:
        """Let the application answer as if it were not guarded."""
        return self._watch.reached(hold, lease)

    def _rejoined(self) -> Receive:
        """Return what the app receives by where it is not guarded: all of its body, whatever was read of it here."""
        if self._body_is_whole or self._body_is_cut or self._body.size:
            return Rejoined(self._body, self._receive, is_whole=self._body_is_whole, is_cut=self._body_is_cut)
        return self._receive

    async def run_handler(self, run: RunHandler) -> Ending:
        """Run the app in a task of its own, and hold its answer back."""
        if self._is_doubtful(run) and (refused := await self.refuses(run)) is not None:
            return refused
        self.is_interruptible = False
        scope = self._scope
        if "extensions" in scope:
            hide_extensions(scope)
        scope[EXCHANGE] = WHOLE_APP
        operation = scope[OPERATION] = self._operation(run)
        app_run = AppRun(self._send, self._killed)
        ending = app_run.hold_back(operation, run)
        if run.lease is not None:
            self.guard.leases.add(run.hold, run.lease, app_run.lose)
        app_run.start(self.guard.app, scope, Taken(self._body, self._receive, app_run), self._body)
        self._app_run = app_run
        return await ending

    async def _killed(self) -> None:
        """Clean up: what the handler did is not known, and its lease decides; without one, nothing of it may stay."""
        self.let_go()
        await self.undo()

    async def principal(self) -> object:
        """Ask the application for the user of this request."""
        if self.guard.gate.is_closed:
            self.guard.gate.check()
        if self.guard.scope is SINGLE_TENANT:
            return SINGLE_TENANT.principal
        named = self.guard.scope(RequestView.of(self._head, full_path(self._scope), self._scope))
        if not inspect.isawaitable(named):
            return named
        return await interruptible(Theirs(named))

    async def read_body(self, limit: int) -> Buffer | None:
        """Read the whole body, while it is within the limit."""
        for name, value in self._head.headers:
            if name == b"content-length" and value.isdigit() and int(value) > limit:
                return None
        body = self._body
        try:
            while True:
                message = await self._receive()
                if message["type"] == "http.disconnect":
                    self._body_is_cut = True
                    raise Interrupted
                body.add(message.get("body", b""))
                self._body_is_whole = not message.get("more_body", False)
                if body.size > limit:
                    return None
                if self._body_is_whole:
                    return body.buffer()
        except asyncio.CancelledError as cancelled:
            raise Interrupted from cancelled

    async def wait(self, wish: Wait) -> Found | Again | TooManyWaiters:
        """Wait for another request to end, unless the client hangs up."""
        if self._disconnect is None:
            self._disconnect = self.listen_for_disconnect()
            self._disconnect.listen(self.leave)
        return await super().wait(wish)

    def listen_for_disconnect(self) -> Disconnect:
        """Have a line to the client. Its whole request was read."""
        self._receive = disconnect = Disconnect(self._receive)
        return disconnect


class StoredPorts(RequestPorts):
    """Runs a stored request again, on from where it is stuck. There is no client: its answer is stored."""

    _route_policy: Policy | None = None

    def __init__(self, guard: AppGuard, policy: Policy, stuck: Stuck, request: Request) -> None:
        """Run *request*, the operation of which is *stuck*."""
        super().__init__(guard, policy)
        self._stuck = stuck
        self._head = request.head
        self._body.add(request.body)
        self._was_taken = True

    async def finish_it(self, scope: ASGIScope) -> bool:
        """Run it; False: another worker was quicker."""
        self._scope, self._receive, self._send = scope, silence, nowhere
        scope[STORED] = self._judge_by
        try:
            await Running(self._serve(), self)
        except asyncio.CancelledError:
            if self._app_run is not None:
                self._app_run.detach()
            raise
        finally:
            # Each would hold the other until the garbage collector comes.
            scope.pop(STORED, None)
            if self._app_run is None:
                self._body.close()
        return self._was_taken

    async def _flow_of_finish(self) -> Reply:
        reply = await finish(seen_by_flow(self), self._stuck, self._policy, os.urandom(16))
        self._was_taken = reply is not None
        return Send(Answer(HTTPStatus.NO_CONTENT)) if reply is None else reply

    def _flow(self) -> Coroutine[Any, Any, Reply]:
        return self._flow_of_finish()

    def route_policy(self) -> Policy | None:
        """Return the policy of the route that the request has come to."""
        return self._route_policy

    async def _judge_by(self, policy: Policy) -> None:
        """Go on by *policy*, that of the route which the stored request has come to."""
        run = self._app_run
        if run is None or run.has_ended or self._hold is None:
            return
        self._route_policy = policy
        run.judge_by(policy.max_response_body)
        self.guard.leases.add(self._hold, policy.lease, run.lose)
