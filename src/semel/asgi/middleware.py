"""The middleware, and the server's start and end. What happens to one request is in ``ports.py``."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar

from semel.asgi.ports import AppGuard, RequestPorts, StoredPorts
from semel.asgi.protocol import (
    EXCHANGE,
    WHOLE_APP,
    ASGIApp,
    ASGIScope,
    ASGISend,
    Message,
    Receive,
    full_path,
    mount_of,
)
from semel.asgi.refusals import see_refusals
from semel.asgi.route import NO_STATUS_ROUTE, PerRoute, RoutePorts
from semel.asgi.status import RouteStatus, StatusPorts
from semel.asgi.stored import scope_of, surroundings_of
from semel.core.commands import Again, Look, Park, ReadRequest
from semel.core.encrypted import refuse_marked
from semel.core.message import Request, one_line, request_of
from semel.core.outcome import Door
from semel.core.policy import NEVER_GUARDED, Policy
from semel.core.record import Stuck
from semel.core.status import STATUS_PATH, checked_path, name_below
from semel.errors import ConfigurationError, StoreUnavailable
from semel.guard.request import Paths, RequestView, Routes, check_modes, checked_scope, status_path_for
from semel.guard.shutdown import Gate
from semel.guard.unstored import AsyncUnstored
from semel.guard.waiting import AsyncWaiters
from semel.operation import enter, is_left_over
from semel.stores import AsyncStore, async_store
from semel.stores.leases import AsyncLeases
from semel.telemetry.logs import logger
from semel.telemetry.tally import Tally
from semel.work import AsyncBacklog, AsyncWorkers, Plan
from semel.work.backlog import CONCURRENCY, looks_every
from semel.work.completer import Finished

NamesUser = Callable[[RequestView], str | Awaitable[str | None] | None]


class IdempotencyMiddleware:
    """Guards the unsafe requests of an ASGI app that carry an idempotency key. Everything else passes untouched."""

    #: As metrics have it.
    door: ClassVar[Door] = "asgi"
    #: What knows which paths are guarded.
    routing: ClassVar[type[Routes]] = Routes

    def __init__(
        self,
        app: ASGIApp,
        *,
        store: str | AsyncStore | Any = "sqlite:///semel.db",
        scope: NamesUser,
        policy: Policy | None = None,
        paths: Paths = None,
        work: bool = False,
        concurrency: int = CONCURRENCY,
        status_path: str | None = STATUS_PATH,
    ) -> None:
        """Wrap *app*. *scope* names the user of a request; *paths* may narrow down what is guarded.

        With ``scope=PER_ROUTE`` each route says for itself, once the application's own login has run: *policy* is then
        that of routes that have none of their own.

        *store* is a URL, a store, or what the application already has: an SQLAlchemy async engine or sessionmaker, a
        pool of asyncpg's or psycopg's. With *work*, this process also sweeps and reaps, and runs what was accepted or
        what no client came back for, *concurrency* at a time, as ``semel work`` does.

        Where a policy accepts requests to be run later, their state is asked for below *status_path*.
        """
        see_refusals()
        self.app = app
        self.store = store if isinstance(store, AsyncStore) else async_store(store)
        self.routes = self.routing(policy, paths)
        check_modes(self.store, self.routes.policies)
        status_path = _status_path(scope, self.routes, status_path)
        is_accepting = status_path is not None
        #: What the completers of this process share.
        self.backlog = AsyncBacklog(looks_every(is_accepting=is_accepting), self.store.listen if is_accepting else None)
        #: What a policy with enforcement="report" has seen in this process: ``tally.snapshot()``.
        self.tally = Tally()
        leases, room = AsyncLeases(self.store.renew, self.store.watch), AsyncWaiters(self.store.listen)
        self.guard = AppGuard(
            store=self.store,
            leases=leases,
            gate=Gate(),
            room=room,
            unstored=AsyncUnstored(self.store.perform, leases, room.hint),
            tally=self.tally,
            status_path=status_path,
            app=app,
            scope=checked_scope(scope),
            wake=self.backlog.wake,
            door=self.door,
            pattern=self.routes.pattern_at,
        )
        self.workers = (
            AsyncWorkers(Plan(concurrency=concurrency).services(self.store, self.finish, self.backlog))
            if work
            else None
        )
        self._is_per_route = isinstance(scope, PerRoute)
        self._surroundings: dict[str, Any] = {}

    async def finish(self, stuck: Stuck) -> Finished:
        """Run a stuck operation's stored request; return the status it ended with, None when it did not end.

        ``AGAIN``: it was not run, since another worker has it or this process is about to end.
        """
        if self.guard.gate.is_closed:
            return Again.AGAIN
        hold = stuck.hold
        request = await self.store.perform(ReadRequest(hold))
        if request is None:
            return Again.AGAIN
        refuse_marked(request.head.headers)
        scope = scope_of(request, self._surroundings)
        method, path = request.head.method, full_path(scope)
        # A route says by itself, once it is reached, which methods its policy guards.
        policy = self.routes.policy_at(path) if self._is_per_route else self.routes.policy_for(method, path)
        if policy is None:
            logger.error("%s is not guarded any more: it is parked.", _shown(request))
            await self.store.perform(Park(hold, if_silent=True, reason="not guarded any more"))
            return None
        try:
            if not await StoredPorts(self.guard, policy, stuck, request).finish_it(scope):
                return Again.AGAIN
        except BaseException:
            # The app's own, unless it is us who are stopped. There is no server to report it to.
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            logger.exception("%s failed, run without its client.", _shown(request))
        record = await self.store.perform(Look(hold.scope, hold.key))
        return record.answer.status if record and record.answer else None

    def drain(self) -> None:
        """Take on nothing new: guarded requests are refused (503), and those under way end. SIGTERM does this too."""
        self.guard.gate.close()

    async def __call__(self, scope: ASGIScope, receive: Receive, send: ASGISend) -> None:
        """Serve one connection of the server's."""
        if scope["type"] == "lifespan":
            self._surroundings = surroundings_of(scope)
            lifespan = _Lifespan(self, receive, send)
            await self.app(scope, lifespan.receive, lifespan.send)
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if is_left_over():
            # A pipelined request may be begun in the context of the one before it, once that is answered.
            with enter(None):
                await self(scope, receive, send)
            return
        if self.workers is not None and not self.workers.are_running:
            # Not every server speaks of its start.
            self._surroundings = surroundings_of(scope)
            self.workers.start()
        ports = self._ports(scope)
        if ports is None:
            await self.app(scope, receive, send)
        else:
            await ports.serve(scope, receive, send)

    def _ports(self, scope: ASGIScope) -> RequestPorts | None:
        method, path = scope["method"].upper(), full_path(scope)
        if self.guard.status_path is not None and method in {"GET", "HEAD"}:
            name = name_below(mount_of(scope) + self.guard.status_path, path)
            if name is not None:
                kind = RouteStatus if self._is_per_route else StatusPorts
                return kind(self.guard, self.routes.accepting or self.routes.policy, name)
        if not self._is_per_route:
            policy = self.routes.policy_for(method, path)
            return RequestPorts(self.guard, policy) if policy is not None else None
        # Claimed around the whole app already, and the route that claims it again is to be told so.
        is_taken = scope.get(EXCHANGE) == WHOLE_APP
        policy = None if is_taken or method in NEVER_GUARDED else self.routes.policy_at(path)
        return RoutePorts(self.guard, policy) if policy is not None else None


class _Lifespan:
    """The server's start and end, which are also the store's."""

    def __init__(self, middleware: IdempotencyMiddleware, receive: Receive, send: ASGISend) -> None:
        self._middleware = middleware
        self._receive = receive
        self._send = send

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "lifespan.startup":
            self._middleware.guard.gate.is_closed = False  # An app may be started once more in the same process.
        elif message["type"] == "lifespan.shutdown":
            # What is under way may need what the app is about to close.
            self._middleware.drain()
            if self._middleware.workers is not None:
                await self._middleware.workers.stop()
            await self._middleware.guard.unstored.aclose()
        return message

    async def send(self, message: Message) -> None:
        store = self._middleware.store
        if message["type"] == "lifespan.startup.complete":
            self._middleware.guard.gate.close_on_sigterm()
            try:
                await store.open()
            except StoreUnavailable as error:
                # It may be up again before the first request is. Until then, requests are refused with 503.
                logger.warning("%s", error)
            except Exception as error:
                await self._send({"type": "lifespan.startup.failed", "message": str(error)})
                raise
            store.ended.begin()  # Not only with the first request: until then there were none, which is known, too.
            if self._middleware.workers is not None:
                self._middleware.workers.start()
        elif message["type"].startswith("lifespan.shutdown."):
            await self._middleware.guard.close()
            await store.close()
        await self._send(message)


def _shown(request: Request) -> str:
    return one_line(request_of(request.head.method, request.head.path))


def _status_path(scope: object, routes: Routes, given: str | None) -> str | None:
    """Return where the state of operations is asked for, in an app with this *scope*."""
    if not isinstance(scope, PerRoute):
        return status_path_for(routes, given)
    if scope.tells_status:
        return checked_path(given)  # Its routes have policies of their own, which may accept.
    if routes.accepting is not None:
        raise ConfigurationError(NO_STATUS_ROUTE)
    return None
