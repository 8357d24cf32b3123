"""One guarded request of a WSGI app and its response. ``flows/serve`` says in what order."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from http.client import responses
from typing import Any
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from semel.core.commands import (
    Begin,
    Command,
    Ending,
    Finish,
    NameScope,
    NotStarted,
    Pause,
    ReadBody,
    RunHandler,
    Tell,
    Undo,
)
from semel.core.fingerprint import Buffer
from semel.core.message import Answer, Request
from semel.core.policy import Policy
from semel.core.record import Hold, Stuck
from semel.door import Body, Gate, RequestView, framed
from semel.drivers import run
from semel.flows.finish import finish
from semel.flows.reply import PassOn, Reply, Send
from semel.flows.serve import serve
from semel.operation import Operation
from semel.stage import Stage
from semel.stores import Store
from semel.stores.keeper import Keeper
from semel.stores.transaction import Transaction
from semel.telemetry.logs import log
from semel.wsgi.environ import head_of, path_of, put_body, read_body
from semel.wsgi.response import Leaving, Response, then_raise


@dataclass(frozen=True, slots=True)
class Guard:
    """What the requests of one app share."""

    app: WSGIApplication
    store: Store
    keeper: Keeper
    gate: Gate
    #: Says whose request it is.
    scope: Callable[[RequestView], Any]


class Exchange:
    """One guarded request and its response."""

    def __init__(self, guard: Guard, policy: Policy, environ: WSGIEnvironment, start_response: StartResponse) -> None:
        """Guard one request to an app by *policy*."""
        self._guard = guard
        self._policy = policy
        self._environ = environ
        self._start_response = start_response
        self._head = head_of(environ)
        self._body = Body()
        self._hold: Hold | None = None
        self._transaction: Transaction | None = None
        self._response: Response | None = None

    def serve(self) -> Iterable[bytes]:
        """Take the request from its headers to its answer."""
        try:
            notes_replays = self._guard.store.notes_replays
            flow = serve(self._head, self._policy, os.urandom(16), notes_replays=notes_replays)
            return self._give(run(flow, self._perform))
        except BaseException:
            # The server gets no iterable to close, so it is for us to do; and a thread that is killed in the middle
            # leaves no transaction open.
            try:
                self._close()
            finally:
                self.end(Undo())
            raise
        finally:
            # Whatever became of it, a lease that nobody works under must be able to run out.
            if self._hold is not None:
                self._guard.keeper.discard(self._hold)

    def finish(self, stuck: Stuck, request: Request) -> None:
        """Run a stored *request* again, on from where it is stuck. Nobody waits for the answer: it is stored."""
        self._body.add(request.body)
        try:
            reply = run(finish(stuck, self._policy, os.urandom(16)), self._perform)
            if reply is not None:
                for _ in self._give(reply):
                    pass
        finally:
            self._close()
            if self._hold is not None:
                self._guard.keeper.discard(self._hold)

    def _perform(self, command: Command[Any]) -> Any:
        perform = _PERFORM.get(type(command))
        return perform(self, command) if perform else self._guard.store.perform(command)

    def name_scope(self, _command: NameScope) -> object:
        """Ask the application whose request this is."""
        self._guard.gate.check()
        return self._guard.scope(RequestView.of(self._head, path_of(self._environ), self._environ))

    def read_body(self, command: ReadBody) -> Buffer | None:
        """Read the whole body, while it is within the limit."""
        return self._body.buffer() if read_body(self._environ, self._head, self._body, command.limit) else None

    def begin(self, command: Begin) -> Any:
        """Open the transaction that the handler will write in."""
        self._transaction = self._guard.store.transaction()
        return self._transaction.perform(command)

    def end(self, command: Command[Any]) -> Any:
        """End it."""
        if self._transaction is None:  # It could not be opened, and there is none to undo.
            return None
        return self._transaction.perform(command)

    def run_handler(self, command: RunHandler) -> Ending:
        """Let the application handle the request."""
        if self._guard.gate.is_closed:
            return NotStarted()
        stage = None if self._transaction else Stage(self._guard.store)
        operation = Operation(command.hold, command.progress, stage=stage, transaction=self._transaction)
        if command.lease is not None:
            self._hold = command.hold
            self._guard.keeper.add(command.hold, command.lease, partial(_lose, operation))
        put_body(self._environ, self._body)
        self._response = Response(self._environ, operation, command.limit)
        return self._response.take(self._guard.app)

    def _give(self, reply: Reply) -> Iterable[bytes]:
        response = self._response
        if isinstance(reply, PassOn):
            if response is None:
                return self._guard.app(self._environ, self._start_response)
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


def _lose(operation: Operation) -> None:
    """Say that another worker has the operation. A thread can't be stopped; its next step is refused."""
    operation.story.is_lost = True


# How an exchange carries out the commands that are not the store's.
_PERFORM: dict[type[Command[Any]], Callable[[Exchange, Any], Any]] = {
    NameScope: Exchange.name_scope,
    ReadBody: Exchange.read_body,
    RunHandler: Exchange.run_handler,
    Begin: Exchange.begin,
    Finish: Exchange.end,
    Undo: Exchange.end,
    Pause: lambda _, command: time.sleep(command.duration.total_seconds()),
    Tell: lambda _, command: log(command.happening),
}
