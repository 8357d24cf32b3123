"""The ports of one guarded request of a WSGI app, and its response. ``flows/serve`` says in what order."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from http import HTTPStatus
from http.client import responses
from typing import Any, cast
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from semel.core.fingerprint import Buffer
from semel.core.handler import Ending
from semel.core.message import Answer, Request
from semel.core.outcome import Door
from semel.core.policy import Policy
from semel.core.record import Hold, Stuck
from semel.core.status import mounted_path
from semel.flows.finish import finish
from semel.flows.ports import GuardPorts
from semel.flows.reply import PassOn, Reply, Reraise, Send
from semel.flows.report import report
from semel.flows.serve import serve
from semel.guard.body import Body, Limits, framed, inside
from semel.guard.measuring import measured
from semel.guard.ports import Guard, ThreadPorts
from semel.guard.request import RequestView
from semel.guard.running import Handover, Split, interrupted_by_death
from semel.operation import Operation, around, enter
from semel.wsgi.environ import head_of, path_of, put_body, read_body
from semel.wsgi.response import Leaving, Response, then_raise
from semel.wsgi.watching import give_back, watched


def _no_workers() -> None:
    """Wake no worker: there is none in this process."""


def _no_close() -> None:
    """Close nothing: what an app returned need not have a ``close``."""


def _no_pattern(_path: str) -> None:
    """Know no pattern."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AppGuard(Guard):
    """What the requests of one app share."""

    app: WSGIApplication
    #: Names the user of a request.
    scope: Callable[[RequestView], Any]
    #: Wakes the completers of this process, if there are any, to look for accepted operations.
    wake: Callable[[], None] = _no_workers
    #: Returns the pattern by which a path is guarded, if it is by one: what its endpoint is called in metrics.
    pattern: Callable[[str], str | None] = _no_pattern


class RequestPorts(ThreadPorts):
    """One guarded request and its response."""

    guard: AppGuard

    def __init__(
        self, guard: AppGuard, policy: Policy, environ: WSGIEnvironment, start_response: StartResponse
    ) -> None:
        """Guard one request to an app by *policy*."""
        super().__init__(guard, policy)
        self._policy = policy
        self._environ = environ
        self._start_response = start_response
        self._head = head_of(environ)
        self._body = Body()
        self._body_is_whole = False
        self._response: Response | None = None
        #: How long an answer is held back; None: until it is complete, since there is no client.
        self._max_time: timedelta | None = policy.max_held

    def serve(self) -> Iterable[bytes]:
        """Take the request from its headers to its answer."""
        status_path = mounted_path(self._head.mount, self.guard.status_path)
        notes, token = self.guard.store.notes_replays, os.urandom(16)
        if self._policy.enforcement == "report":
            return self._watch(Split(measured(report), cast("GuardPorts", self), self._head, self._policy, token))
        try:
            reply = self.conduct(
                measured(serve),
                self._head,
                self._policy,
                token,
                notes_replays=notes,
                status_path=status_path,
                around=around(),
            )
            if isinstance(reply, Send) and reply.answer.status == HTTPStatus.ACCEPTED:
                self.guard.wake()
            return self._give(reply)
        except BaseException:
            # The server gets no iterable to close, so this code closes it.
            self._close()
            raise

    @property
    def door(self) -> Door:
        """The entry point."""
        return "wsgi"

    def endpoint(self) -> str | None:
        """Return the pattern by which its path is guarded: WSGI has no word for a route, and Flask forgets its own."""
        pattern = self.guard.pattern(path_of(self._environ))
        return None if pattern is None else f"{self._head.method} {pattern}"

    def finish_it(self, stuck: Stuck, request: Request) -> bool:
        """Run a stored *request* again, from its recovery point on; False: another worker took it first.

        The answer is stored, and sent to no client.
        """
        self._body.add(request.body)
        if stuck.is_accepted:
            self._max_time = None
        try:
            reply = self.conduct(finish, stuck, self._policy, os.urandom(16))
            if reply is not None:
                for _ in self._give(reply):
                    pass
        finally:
            self._close()
        return reply is not None

    def handle(self, operation: Operation, limit: int) -> Ending:
        """Let the application handle the request."""
        put_body(self._environ, self._body)
        self._response = Response(self._environ, Limits(limit, self._max_time, operation))
        return self._response.take(self.guard.app)

    async def principal(self) -> object:
        """Ask the application for the user of this request."""
        self.guard.gate.check()
        with interrupted_by_death():
            return self._named()

    def _named(self) -> object:
        return self.guard.scope(RequestView.of(self._head, path_of(self._environ), self._environ))

    async def read_body(self, limit: int) -> Buffer | None:
        """Read the whole body, while it is within the limit."""
        with interrupted_by_death():
            self._body_is_whole = read_body(self._environ, self._head, self._body, limit)
        return self._body.buffer() if self._body_is_whole else None

    async def run_unguarded(self, hold: Hold | None, lease: timedelta | None) -> Any:
        """Leave the flow until the application has answered: the server has to iterate over its response first."""
        if hold is not None and lease is not None:
            self.keep_lease(hold, lease)
        return await Handover()

    def _watch(self, flow: Split[Reply]) -> Iterable[bytes]:
        """Let the application answer unguarded, and note how it ends."""
        try:
            flow.start()
            if self._body_is_whole or self._body.size:
                give_back(self._environ, self._body, is_whole=self._body_is_whole)
            return watched(self.guard.app, self._environ, self._start_response, partial(self._conclude, flow))
        except BaseException:
            self._stop_watching()
            raise

    def _conclude(self, flow: Split[Reply], status: int | None) -> None:
        try:
            if flow.is_left:
                flow.resume(status)
        finally:
            self._stop_watching()

    def _stop_watching(self) -> None:
        self.let_go()
        self._body.close()

    def _give(self, reply: Reply) -> Iterable[bytes]:
        response = self._response
        if isinstance(reply, PassOn):
            if response is None and reply.unrecorded is not None:
                return self._run_unrecorded(self.unrecorded(reply.unrecorded))
            if response is None:
                return self._stand_aside()
            return Leaving(response.flow_on(self._start_response), self._close)
        if isinstance(reply, Send):
            if response is not None and reply.answer is response.answer:
                self._start_response(response.status, response.fields)
            else:
                self._start(reply.answer)
            return Leaving([reply.answer.body or b""], self._close)
        assert isinstance(reply, Reraise)  # noqa: S101 - the fourth, Done, is of a flow that only reports
        if reply.answer is None:
            raise reply.error
        # The answer first, so that this client and its retries get the same. Then the error goes on to the middleware
        # that reports errors: it sees that a response has begun, and does not begin another.
        self._start(reply.answer)
        return Leaving(then_raise(reply.answer.body or b"", reply.error), self._close)

    def _run_unrecorded(self, operation: Operation) -> Iterable[bytes]:
        """Let the application answer unguarded, within *operation*; its iterable, too: it may be the whole handler."""
        with enter(operation):
            answer = self._stand_aside()

        def close() -> None:
            with enter(operation):
                getattr(answer, "close", _no_close)()

        return Leaving(inside(operation, answer), close)

    def _stand_aside(self) -> Iterable[bytes]:
        """Let the application answer unguarded. If the body was read already, the application can read it again."""
        if not self._body.size:
            return self.guard.app(self._environ, self._start_response)
        give_back(self._environ, self._body, is_whole=self._body_is_whole)
        answer = self.guard.app(self._environ, self._start_response)

        def close() -> None:
            try:
                getattr(answer, "close", _no_close)()
            finally:
                self._body.close()

        return Leaving(answer, close)

    def _start(self, answer: Answer) -> None:
        fields = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in framed(answer)]
        self._start_response(f"{answer.status} {responses.get(answer.status, 'Unknown')}", fields)

    def _close(self) -> None:
        try:
            if self._response is not None:
                self._response.close()
        finally:
            self._body.close()
