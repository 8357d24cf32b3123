"""The middleware, and its background services. What happens to one request is in ``ports.py``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from semel.core.commands import Again, Look, Park, ReadRequest
from semel.core.encrypted import refuse_marked
from semel.core.message import Request, one_line, request_of
from semel.core.policy import Policy
from semel.core.record import Stuck
from semel.core.status import STATUS_PATH, name_below
from semel.errors import ConfigurationError
from semel.guard.request import Paths, RequestView, Routes, check_modes, checked_scope, status_path_for
from semel.guard.shutdown import Gate
from semel.guard.unstored import Unstored
from semel.guard.waiting import Waiters
from semel.stores import Store, shared_store
from semel.stores.leases import Leases
from semel.telemetry.logs import logger
from semel.telemetry.tally import Tally
from semel.work import Backlog, Plan, Workers
from semel.work.backlog import CONCURRENCY, looks_every
from semel.work.completer import Finished
from semel.wsgi.environ import method_of, mount_of, path_of
from semel.wsgi.ports import AppGuard, RequestPorts
from semel.wsgi.status import StatusPorts
from semel.wsgi.stored import environ_of, nowhere

NamesUser = Callable[[RequestView], str | None]


class IdempotencyMiddleware:
    """Guards the unsafe requests of a WSGI app that carry an idempotency key. Everything else passes untouched."""

    def __init__(
        self,
        app: WSGIApplication,
        *,
        store: str | Store | Any = "sqlite:///semel.db",
        scope: NamesUser,
        policy: Policy | None = None,
        paths: Paths = None,
        work: bool = False,
        concurrency: int = CONCURRENCY,
        status_path: str | None = STATUS_PATH,
    ) -> None:
        """Wrap *app*. *scope* returns the user of a request; *paths* may limit which paths are guarded.

        *store* is a URL, a store, or what the application already has: an SQLAlchemy engine or sessionmaker, a pool of
        psycopg's. With *work*, this process also sweeps and reaps, and runs accepted operations and those that no
        client retries, *concurrency* at a time, as ``semel work`` does.

        If a policy accepts requests to be run later, their status URLs are below *status_path*.
        """
        self.app = app
        self.store = shared_store(store, self)
        if inspect.iscoroutinefunction(scope):
            raise ConfigurationError("scope must be a plain function under WSGI, which can't await.")
        self.routes = Routes(policy, paths)
        check_modes(self.store, self.routes.policies)
        status_path = status_path_for(self.routes, status_path)
        is_accepting = status_path is not None
        #: What the completers of this process share.
        self.backlog = Backlog(looks_every(is_accepting=is_accepting), self.store.listen if is_accepting else None)
        #: What a policy with enforcement="report" has seen in this process: ``tally.snapshot()``.
        self.tally = Tally()
        leases, room = Leases(self.store.perform, self.store.watch, self.store.renewals), Waiters(self.store.listen)
        self.guard = AppGuard(
            store=self.store,
            leases=leases,
            gate=Gate(),
            room=room,
            unstored=Unstored(self.store.perform, leases, room.hint),
            tally=self.tally,
            status_path=status_path,
            app=app,
            scope=checked_scope(scope),
            wake=self.backlog.wake,
            pattern=self.routes.pattern_at,
        )
        # Here and not at the first request, since signal handlers can be set in the main thread only.
        self.guard.gate.close_on_sigterm()
        self.workers = (
            Workers(Plan(concurrency=concurrency).services(self.store, self.finish, self.backlog)) if work else None
        )

    def finish(self, stuck: Stuck) -> Finished:
        """Run a stuck operation's stored request; return the status it ended with, None when it did not end.

        ``AGAIN``: it was not run, since another worker has it or this process is about to end.
        """
        if self.guard.gate.is_closed:
            return Again.AGAIN
        hold = stuck.hold
        request = self.store.perform(ReadRequest(hold))
        if request is None:
            return Again.AGAIN
        refuse_marked(request.head.headers)
        environ = environ_of(request)
        policy = self.routes.policy_for(request.head.method, path_of(environ))
        if policy is None:
            logger.error("%s is not guarded any more: it is parked.", _shown(request))
            self.store.perform(Park(hold, if_silent=True, reason="not guarded any more"))
            return None
        try:
            if not RequestPorts(self.guard, policy, environ, nowhere).finish_it(stuck, request):
                return Again.AGAIN
        except BaseException:  # noqa: BLE001 - the app's own, in a thread of ours: there is no server to report it to
            logger.exception("%s failed, run without its client.", _shown(request))
        record = self.store.perform(Look(hold.scope, hold.key))
        return record.answer.status if record and record.answer else None

    def drain(self) -> None:
        """Refuse new guarded requests (503), and let those under way end. SIGTERM does this, too."""
        self.guard.gate.close()

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        """Serve one request."""
        if self.workers is not None:
            self.workers.start()  # Here and not before: a server may fork in between.
        method, path = method_of(environ), path_of(environ)
        if self.guard.status_path is not None and method in {"GET", "HEAD"}:
            name = name_below(mount_of(environ) + self.guard.status_path, path)
            if name is not None:
                manner = self.routes.accepting or self.routes.policy
                return StatusPorts(self.guard, manner, environ, start_response).state_of(name)
        policy = self.routes.policy_for(method, path)
        if policy is None:
            return self.app(environ, start_response)
        return RequestPorts(self.guard, policy, environ, start_response).serve()


def _shown(request: Request) -> str:
    return one_line(request_of(request.head.method, request.head.path))
