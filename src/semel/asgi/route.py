"""A request to a route that says by itself whether it is guarded, and by which user: after the application's own login,
which runs on the way there. Until then everything passes, in both directions.
"""

from __future__ import annotations

import asyncio
import inspect
from http import HTTPStatus
from typing import Any

from semel.asgi.app_run import AppRun
from semel.asgi.disconnect import Disconnect
from semel.asgi.ports import AppGuard, RequestPorts
from semel.asgi.protocol import (
    EXCHANGE,
    OPERATION,
    STORED,
    ASGIScope,
    ASGISend,
    Message,
    Receive,
    head_of,
    hide_extensions,
    method_of,
)
from semel.asgi.watching import Watch
from semel.core.fingerprint import Buffer
from semel.core.handler import Ending, RunHandler
from semel.core.message import Answer
from semel.core.policy import NEVER_GUARDED, Policy
from semel.core.problem import refused
from semel.errors import BodyIncomplete, ConfigurationError, Interrupted
from semel.flows.reply import PassOn, Reply, Reraise, Send
from semel.guard.body import Body
from semel.guard.request import NOWHERE_TO_ASK, PRINCIPAL, switched
from semel.guard.running import Running, Theirs
from semel.operation import Operation, around, begin, current
from semel.stores.step import Step

_NOT_INSTALLED = (
    "This route is guarded by itself, and nothing around the app can hold its answer back. "
    "Add IdempotencyMiddleware(app, store=…, scope=PER_ROUTE), or in FastAPI semel.fastapi.install(app, store=…)."
)
_TWICE = (
    "This route names the user of the request, and so does the middleware around the whole app. "
    "Give the middleware scope=PER_ROUTE, or take the scope from the route."
)


NO_STATUS_ROUTE = NOWHERE_TO_ASK.format(
    "Where each route names the user of its requests, one of them has to do so for the status, too: in FastAPI give "
    "semel.fastapi.install(app, store=…, status_scope=current_account), which adds it at status_path="
)


class PerRoute:
    """The scope of an app in which each route says whether it is guarded, and names the user of its requests."""

    def __init__(self, *, tells_status: bool = False) -> None:
        """Say whether one of the routes *tells the status* of operations, by ``tell``."""
        self.tells_status = tells_status

    def __call__(self, _request: object) -> str:
        """Refuse: the route is asked."""
        raise ConfigurationError(_NOT_INSTALLED)

    def __repr__(self) -> str:
        """Spell it as it is written."""
        return "semel.asgi.PER_ROUTE"


PER_ROUTE = PerRoute()


class Settled(Exception):
    """The request has its answer already: a replay, or a refusal. Whatever the route answers now is thrown away."""

    def __init__(self, answer: Answer) -> None:
        """Carry the *answer*, for those who want to know what it was."""
        super().__init__(answer.status)
        self.answer = answer


async def claim(scope: ASGIScope, principal: object, policy: Policy | None = None) -> Operation | None:
    """Guard the request that *scope* describes from here on; None: it bears no key, and need not.

    For a route, once the application's login has named the *principal*; it may be a function of nothing that names it,
    which is called where there is a key. Without a *policy* the middleware's counts. Raises ``Settled`` where the
    request has its answer already; the route has to end then, and to do nothing.
    """
    if PRINCIPAL in scope:
        # A stored request, run again: it was claimed before it came here.
        if policy is not None and STORED in scope:
            await scope[STORED](policy)
        return current()
    exchange = scope.get(EXCHANGE)
    if isinstance(exchange, RoutePorts):
        operation = await exchange.begin_guarding(principal, policy)
        if operation is not None:
            scope[OPERATION] = operation
        return operation
    if method_of(scope) in NEVER_GUARDED:
        return None
    raise ConfigurationError(_TWICE if exchange is not None else _NOT_INSTALLED)


#: Flows beside their app. A loop holds its tasks weakly, so they are held here.
_under_way: set[asyncio.Task[None]] = set()


class RoutePorts(RequestPorts):
    """One request, guarded once its route has said so, in the app's own task."""

    _app_run: AppRun
    _running: Running[Reply]
    _ending: Step[Ending] | None = None

    def __init__(self, guard: AppGuard, policy: Policy) -> None:
        """Remember of its body as much as *policy* lets a request have."""
        super().__init__(guard, policy)
        self._principal: object = None

    async def serve(self, scope: ASGIScope, receive: Receive, send: ASGISend) -> None:
        """Serve the request that the server describes."""
        self._scope = scope
        self._head = head_of(scope)
        self._tape = Tape(self._body, receive, self._policy.max_request_body)
        self._watch = Watch(send, self.guard.leases)
        self._app_run = AppRun(self._watch, self._killed)
        scope[EXCHANGE] = self
        hide_extensions(scope)
        self._tape.app_run = self._app_run
        self._app_run.start(self.guard.app, scope, self._tape, self._body)
        try:
            await self._app_run.done
        except asyncio.CancelledError:
            self._app_run.detach()
            self._watch.give_up()
            raise
        except Exception:
            await self._watch.conclude()
            raise
        else:
            await self._watch.conclude()
        finally:
            # Each would hold the other until the garbage collector comes.
            scope.pop(EXCHANGE, None)
            if self._disconnect is not None:
                self._disconnect.close()

    async def begin_guarding(self, principal: object, policy: Policy | None) -> Operation | None:
        """Guard the request from here on, by *policy*, for *principal*."""
        policy = self._policy if policy is None else switched(policy)
        self._check(policy)
        if self._head.method not in policy.methods:
            return None
        self._principal, self._policy = principal, policy
        self.ask_as(policy)
        if policy.enforcement == "report":
            self._watch.begin(Running(self._flow(), self))
            await self._watch.is_reached()
            return None
        outside = around()
        self._running = Running(self._flow(), self)
        try:
            reply = await self._running
        except Interrupted:
            # The client went away before it had sent the whole request, or while it was kept waiting: there is no one
            # to answer, and nothing to do.
            reply = Send(refused(BodyIncomplete(), policy))
        if self._running.is_left:
            _under_way.add(task := asyncio.get_running_loop().create_task(self._conclude()))
            task.add_done_callback(_under_way.discard)
            return self._app_run.operation
        self.let_go()
        if isinstance(reply, Send):
            if reply.answer.status == HTTPStatus.ACCEPTED:
                self.guard.wake()
            await self._app_run.overrule(reply.answer)
            raise Settled(reply.answer)
        if isinstance(reply, PassOn) and reply.unrecorded is not None:
            operation = self.unrecorded(reply.unrecorded)
            begin(operation)
            return operation
        # It bears no key; or a guard further outside has claimed it, and the route is part of that operation.
        return None if outside is None else current()

    async def run_handler(self, run: RunHandler) -> Ending:
        """Hold back the answer of the app, which is on its way to its handler, and goes on with this."""
        if self._is_doubtful(run) and (refusal := await self.refuses(run)) is not None:
            return refusal
        self.is_interruptible = False
        operation = self._operation(run)
        ending = self._running.leaves_at = self._app_run.hold_back(operation, run)
        if run.lease is not None:
            self.guard.leases.add(run.hold, run.lease, self._app_run.lose)
        begin(operation)
        return await ending

    async def _conclude(self) -> None:
        """Run the rest of the flow, beside the app, and let the client have the answer."""
        try:
            reply = await self._running.rest()
        except Exception as error:  # noqa: BLE001 - it goes on to the server, out of the app
            reply = Reraise(error, None)
        except BaseException:
            self._app_run.kill()
            raise
        finally:
            self.let_go()
        await self._app_run.give(reply)

    async def principal(self) -> object:
        """Name the user of this request, as the route's login did."""
        self.guard.gate.check()
        named: Any = self._principal() if callable(self._principal) else self._principal
        return await Theirs(named) if inspect.isawaitable(named) else named

    async def read_body(self, limit: int) -> Buffer | None:
        """Read what the app has not read yet, while it is within the limit."""
        try:
            return self._body.buffer() if await self._tape.read(limit) else None
        except asyncio.CancelledError as cancelled:
            raise Interrupted from cancelled

    def listen_for_disconnect(self) -> Disconnect:
        """Have a line to the client."""
        return self._tape.listen_for_disconnect()

    def _check(self, policy: Policy) -> None:
        if self._app_run.has_begun or not self._app_run.is_flowing:
            raise ConfigurationError("A route is guarded once, before it has begun to answer.")
        if policy.may_accept and self.guard.status_path is None:
            raise ConfigurationError(NO_STATUS_ROUTE)
        if policy.max_request_body > self._tape.limit:
            raise ConfigurationError(
                f"This route takes bodies of {policy.max_request_body} bytes, and the middleware around the app "
                f"remembers {self._tape.limit}. Give the middleware a policy with a higher max_request_body."
            )


class Tape:
    """The app's ``receive``, with a copy of the body kept: its route may want to know later what was asked."""

    def __init__(self, body: Body, receive: Receive, limit: int) -> None:
        """Pass on what *receive* brings, and keep up to *limit* bytes of it in *body*."""
        self.body = body
        self.limit = limit
        self._receive = receive
        self._given = 0
        self._is_whole = False
        #: The app knows that it has the whole body. We may have read the end of it before, and it may be empty.
        self._is_given = False
        self._is_too_long = False
        #: The run of the app that receives from it.
        self.app_run: AppRun | None = None

    async def __call__(self) -> Message:
        """Give the app its next message."""
        if self._given < self.body.size or (self._is_whole and not self._is_given):
            chunk = bytes(self.body.buffer()[self._given :])
            self._given = self.body.size
            self._is_given = self._is_whole
            return {"type": "http.request", "body": chunk, "more_body": not self._is_whole}
        message = await self._next()
        self._given = self.body.size
        self._is_given = self._is_whole
        run = self.app_run
        if message["type"] == "http.disconnect" and run is not None and not run.is_flowing:
            # A client that hangs up does not end a guarded request: the app would stop half-way.
            await run.is_sent()
        return message

    async def read(self, limit: int) -> bool:
        """Read the rest of the body, for ourselves; False: it is longer than *limit*."""
        while not self._is_whole and not self._is_too_long and self.body.size <= limit:
            message = await self._next()
            if message["type"] == "http.disconnect":
                raise Interrupted
        return self._is_whole and not self._is_too_long and self.body.size <= limit

    def listen_for_disconnect(self) -> Disconnect:
        """Watch for a client that disconnects. Its messages go to the app as before."""
        self._receive = disconnect = Disconnect(self._receive)
        return disconnect

    async def _next(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request" and not self._is_too_long:
            self.body.add(message.get("body", b""))
            self._is_whole = not message.get("more_body", False)
            self._is_too_long = self.body.size > self.limit
        return message
