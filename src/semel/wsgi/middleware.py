"""A guarded request of a WSGI app, from the server's call to what it is given. ``flows/serve`` says in what order."""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable, Iterable
from http.client import responses
from typing import Any
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from semel.core.commands import Answered, Command, NameScope, Pause, Raised, ReadBody, RunHandler, Streaming, Tell
from semel.core.fingerprint import Buffer
from semel.core.message import Answer
from semel.core.policy import Policy
from semel.core.record import Hold
from semel.door import Body, Paths, RequestView, Routes, checked_scope, framed
from semel.drivers import run
from semel.errors import ConfigurationError
from semel.flows.serve import PassOn, Reply, Send, serve
from semel.operation import Operation
from semel.stores import Store
from semel.stores import store as open_store
from semel.stores.keeper import Keeper
from semel.telemetry.logs import log
from semel.wsgi.environ import head_of, path_of, put_body, read_body
from semel.wsgi.response import Leaving, Response, then_raise

WhoseRequest = Callable[[RequestView], str | None]


class IdempotencyMiddleware:
    """Guards the unsafe requests of a WSGI app that carry an idempotency key. Everything else passes untouched."""

    def __init__(
        self,
        app: WSGIApplication,
        *,
        store: str | Store = "sqlite:///semel.db",
        scope: WhoseRequest,
        policy: Policy | None = None,
        paths: Paths = None,
    ) -> None:
        """Wrap *app*. *scope* says whose request it is; *paths* may narrow down what is guarded."""
        self.app = app
        self.store = open_store(store) if isinstance(store, str) else store
        if not isinstance(self.store, Store):
            raise ConfigurationError(f"store must be a URL or, under WSGI, a Store, not {type(store).__name__}.")
        self.scope = checked_scope(scope)
        if inspect.iscoroutinefunction(scope):
            raise ConfigurationError("scope must be a plain function under WSGI, where nobody could await it.")
        self.routes = Routes(policy, paths)
        self.keeper = Keeper(self.store.perform)

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        """Serve one request of the server's."""
        policy = self.routes.policy_for(environ["REQUEST_METHOD"], path_of(environ))
        if policy is None:
            return self.app(environ, start_response)
        return _Exchange(self, policy, environ, start_response).serve()


class _Exchange:
    """One guarded request and its response."""

    def __init__(
        self, middleware: IdempotencyMiddleware, policy: Policy, environ: WSGIEnvironment, start_response: StartResponse
    ) -> None:
        self._middleware = middleware
        self._policy = policy
        self._environ = environ
        self._start_response = start_response
        self._head = head_of(environ)
        self._body = Body()
        self._hold: Hold | None = None
        self._response: Response | None = None

    def serve(self) -> Iterable[bytes]:
        """Take the request from its headers to its answer."""
        try:
            reply = run(serve(self._head, self._policy, os.urandom(16)), self._perform)
            return self._give(reply)
        except BaseException:
            # The server gets no iterable to close, so it is for us to do.
            self._close()
            raise
        finally:
            # Whatever became of it, a lease that nobody works under must be able to run out.
            if self._hold is not None:
                self._middleware.keeper.discard(self._hold)

    def _perform(self, command: Command[Any]) -> Any:
        perform = _PERFORM.get(type(command))
        return perform(self, command) if perform else self._middleware.store.perform(command)

    def name_scope(self, _command: NameScope) -> object:
        return self._middleware.scope(RequestView.of(self._head, path_of(self._environ), self._environ))

    def read_body(self, command: ReadBody) -> Buffer | None:
        return self._body.buffer() if read_body(self._environ, self._head, self._body, command.limit) else None

    def run_handler(self, command: RunHandler) -> Answered | Streaming | Raised:
        self._hold = command.hold
        self._middleware.keeper.add(command.hold, command.lease)
        put_body(self._environ, self._body)
        self._response = Response(self._environ, Operation(command.hold), command.limit)
        return self._response.take(self._middleware.app)

    def _give(self, reply: Reply) -> Iterable[bytes]:
        response = self._response
        if isinstance(reply, PassOn):
            if response is None:
                return self._middleware.app(self._environ, self._start_response)
            return Leaving(response.flow_on(self._start_response), self._close)
        if isinstance(reply, Send):
            if response is not None and reply.answer is response.answer:
                self._start_response(response.status, response.fields)
            else:
                self._start(reply.answer)
            return Leaving([reply.answer.body or b""], self._close)
        if reply.answer is None:
            raise reply.error
        # The answer first, so that this client and its retries see the same. Then the error goes on to whoever
        # reports errors: they look whether a response has begun, and don't begin another.
        self._start(reply.answer)
        return Leaving(then_raise(reply.answer.body or b"", reply.error), self._close)

    def _start(self, answer: Answer) -> None:
        fields = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in framed(answer)]
        self._start_response(f"{answer.status} {responses.get(answer.status, 'Unknown')}", fields)

    def _close(self) -> None:
        try:
            if self._response is not None:
                self._response.close()
        finally:
            self._body.close()


# How an exchange carries out the commands that are not the store's.
_PERFORM: dict[type[Command[Any]], Callable[[_Exchange, Any], Any]] = {
    NameScope: _Exchange.name_scope,
    ReadBody: _Exchange.read_body,
    RunHandler: _Exchange.run_handler,
    Pause: lambda _, command: time.sleep(command.duration.total_seconds()),
    Tell: lambda _, command: log(command.happening),
}
