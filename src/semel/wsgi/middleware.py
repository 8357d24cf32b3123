"""The middleware, and what runs beside it. What happens to one request is in ``exchange.py``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from semel.core.commands import Look, Park, ReadRequest
from semel.core.policy import Policy
from semel.core.record import Stuck
from semel.door import Gate, Paths, RequestView, Routes, checked_scope
from semel.errors import ConfigurationError
from semel.stores import Store
from semel.stores import store as open_store
from semel.stores.keeper import Keeper
from semel.telemetry.logs import logger
from semel.telemetry.tally import Tally
from semel.work import Completer, Reaper, Service, Sweeper, Workers
from semel.wsgi.environ import method_of, path_of
from semel.wsgi.exchange import AppGuard, Exchange
from semel.wsgi.stored import environ_of, nowhere

WhoseRequest = Callable[[RequestView], str | None]


class IdempotencyMiddleware:
    """Guards the unsafe requests of a WSGI app that carry an idempotency key. Everything else passes untouched."""

    def __init__(
        self,
        app: WSGIApplication,
        *,
        store: str | Store | Any = "sqlite:///semel.db",
        scope: WhoseRequest,
        policy: Policy | None = None,
        paths: Paths = None,
        work: bool = False,
    ) -> None:
        """Wrap *app*. *scope* says whose request it is; *paths* may narrow down what is guarded.

        *store* is a URL, a store, or what the application already has: an SQLAlchemy engine or sessionmaker, a pool of
        psycopg's. With *work*, this process also sweeps, reaps and finishes what no client came back for, as
        ``semel work`` does.
        """
        self.app = app
        self.store = store if isinstance(store, Store) else open_store(store)
        if inspect.iscoroutinefunction(scope):
            raise ConfigurationError("scope must be a plain function under WSGI, where nobody could await it.")
        self.routes = Routes(policy, paths)
        #: What a policy with enforcement="report" has seen in this process: ``tally.snapshot()``.
        self.tally = Tally()
        self.guard = AppGuard(
            store=self.store,
            keeper=Keeper(self.store.perform),
            gate=Gate(),
            tally=self.tally,
            app=app,
            scope=checked_scope(scope),
        )
        # Here and not at the first request, which may come in a thread that may not touch signals.
        self.guard.gate.close_on_sigterm()
        self.workers = Workers(services(self)) if work else None

    def finish(self, stuck: Stuck) -> int | None:
        """Run a stuck operation's stored request again; return the status it ended with, None when it did not end."""
        if self.guard.gate.is_closed:
            return None
        hold = stuck.hold
        request = self.store.perform(ReadRequest(hold))
        if request is None:
            return None
        environ = environ_of(request)
        policy = self.routes.policy_for(request.head.method, path_of(environ))
        if policy is None:
            logger.error("%s %s is not guarded any more: it is parked.", request.head.method, path_of(environ))
            self.store.perform(Park(hold, if_silent=True))
            return None
        try:
            Exchange(self.guard, policy, environ, nowhere).finish(stuck, request)
        except BaseException:  # noqa: BLE001 - the app's own, in a thread of ours: there is no server to report it to
            logger.exception("%s %s failed again.", request.head.method, request.head.path)
        record = self.store.perform(Look(hold.scope, hold.key))
        return record.answer.status if record and record.answer else None

    def drain(self) -> None:
        """Take on nothing new: guarded requests are refused (503), and those under way end. SIGTERM does this too."""
        self.guard.gate.close()

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        """Serve one request of the server's."""
        if self.workers is not None:
            self.workers.start()  # Here and not before: a server may fork in between.
        policy = self.routes.policy_for(method_of(environ), path_of(environ))
        if policy is None:
            return self.app(environ, start_response)
        return Exchange(self.guard, policy, environ, start_response).serve()


def services(middleware: IdempotencyMiddleware) -> list[Service]:
    """Return what cleans up behind *middleware*."""
    store = middleware.store
    return [Sweeper(store, has_completer=True), Reaper(store), Completer(store, middleware.finish)]
