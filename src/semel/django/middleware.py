"""The middleware: it guards the views of a whole project, but for those that are guarded by themselves.

The key is claimed once the URL has found its view and the ``process_view`` of those in front (CSRF, login) has let the
request in; so what no view answers is never kept, and a replay gets past nobody. What is kept is what comes back from
the view and from the middleware behind this one. All of it happens in the thread in which Django runs the ORM of the
request, whichever colour the view has.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, cast

from asgiref.sync import iscoroutinefunction, markcoroutinefunction, sync_to_async
from django.http import HttpResponse

from semel.core.commands import Undo
from semel.core.handler import Ending, Lost, NotStarted, RunHandler
from semel.core.policy import Policy
from semel.core.record import Hold
from semel.core.replay import FIRST_SERVER_ERROR
from semel.django import atomicity, guards
from semel.django.messages import Request, Response, claim
from semel.django.views import Choice, DjangoView, choice_of
from semel.django.waiting import to_the_end
from semel.errors import InProgress, NoEffect, StoreError
from semel.flows.ports import GuardPorts
from semel.flows.reply import PassOn, Reraise, Send
from semel.flows.serve import serve
from semel.guard.endings import raised
from semel.guard.ports import lose
from semel.guard.running import Handover, Split
from semel.guard.views import ViewPorts
from semel.operation import Operation, Steps, around, enter, leave
from semel.stores.unrecorded import Unrecorded

#: Where a request has its ports, between the claim and the end.
_PORTS = "_semel_ports"
#: Where it has the answer that it got in its view's place, on the way back to us: what is between may change it.
_ANSWER = "_semel_answer"


class IdempotencyMiddleware:
    """Guards what ``SEMEL["PATHS"]`` says. In ``MIDDLEWARE`` it comes after those who decide who may come in."""

    sync_capable = True
    async_capable = True

    def __init__(self, get_response: Callable[[Request], Any]) -> None:
        """Pass requests on to *get_response*."""
        self.get_response = get_response
        self._is_async = iscoroutinefunction(get_response)
        if self._is_async:
            markcoroutinefunction(self)
            # So that what is not guarded is not taken to a thread and back.
            self.process_view = self._process_view  # type: ignore[method-assign]
        guards.GATE.close_on_sigterm()

    def policy_for(self, request: Request) -> Policy | None:
        """Return the policy of *request*, or None when it is not guarded. Override it to choose by other things."""
        return guards.routes().policy_for(request.method, request.path)

    def __call__(self, request: Request) -> Any:
        """Serve one request."""
        if self._is_async:
            return to_the_end(self._through(request), if_=lambda: hasattr(request, _PORTS))
        try:
            response = self.get_response(request)
        except BaseException as error:
            _abandon(request, error)
            raise
        return _end(request, response)

    def process_view(self, request: Request, view: Any, _args: Any, _kwargs: Any) -> Any:
        """Claim the key of *request*, which is about to reach its *view*; or answer it."""
        policy = None if choice_of(view) is not None else self.policy_for(request)
        if policy is None or not claim(request):
            return None
        return _start(request, MiddlewarePorts(guards.checked(policy), request))

    async def _process_view(self, request: Request, view: Any, _args: Any, _kwargs: Any) -> Response | None:
        policy = None if choice_of(view) is not None else self.policy_for(request)
        if policy is None or not claim(request):
            return None
        ports = MiddlewarePorts(guards.checked(policy), request)
        try:
            response: Response | None = await sync_to_async(_start)(request, ports)
        except asyncio.CancelledError:
            ports.leave()
            # In the request's own thread, behind a claim that may still be under way there.
            await sync_to_async(_take_back)(request)
            raise
        return response

    def process_exception(self, request: Request, error: Exception) -> Response | None:
        """Note what the view raised, before Django makes an answer of it, and tells everybody that the view failed."""
        ports: MiddlewarePorts | None = getattr(request, _PORTS, None)
        if ports is None:
            return None
        ports.error = error
        # These are answered by us. What stands in for that answer goes no further than the way back to us.
        ports.is_told = ports.operation is None or not isinstance(error, NoEffect | StoreError | InProgress)
        return None if ports.is_told else HttpResponse(status=FIRST_SERVER_ERROR)

    async def _through(self, request: Request) -> Response:
        try:
            response = await self.get_response(request)
        except BaseException as error:
            await sync_to_async(_abandon)(request, error)
            raise
        ports = getattr(request, _PORTS, None)
        if ports is None:
            return _answer(request, response)
        if ports.operation is not None and ports.operation.loose_ends:
            await ports.operation.tie_up()
        return await sync_to_async(_end)(request, response)


class MiddlewarePorts(ViewPorts[Response]):
    """One request, claimed before its view and ended after it. Django calls the view."""

    def __init__(self, policy: Policy, request: Request) -> None:
        """Nothing is begun yet."""
        view = DjangoView(request, _django_calls_it, Choice())
        super().__init__(guards.guard(), policy, view)
        #: What the view raised.
        self.error: Exception | None = None
        #: Whether Django has told of it.
        self.is_told = True
        self.operation: Operation | None = None
        self._limit = 0
        #: Whether the view is to be called now, and its answer to be brought here.
        self.is_under_way = False
        self._is_unrecorded = False
        #: The current operation, and in atomic mode a transaction in the transaction.
        self._open = ExitStack()
        notes, token = self.guard.store.notes_replays, os.urandom(16)
        self._flow = Split(
            serve, cast("GuardPorts", self), view.head, policy, token, notes_replays=notes, around=around()
        )

    def start(self) -> Response | None:
        """Claim the key; return what is to be answered in the view's place."""
        try:
            reply = self._flow.start()
        except BaseException:
            self.abandon()
            raise
        if isinstance(reply, Send):
            self.let_go()
            return self._view.response_of(reply.answer)
        if isinstance(reply, PassOn) and reply.unrecorded is not None:
            # Its guard is switched off: the view is run as an operation, and nothing is done about its answer.
            self._open.enter_context(_current(self.unrecorded(reply.unrecorded)))
            self._is_unrecorded = self.is_under_way = True
        elif self._flow.is_left:
            self.is_under_way = True
        return None

    async def run_handler(self, run: RunHandler) -> Ending:
        """Leave the flow, for Django to call the view."""
        if self.guard.gate.is_closed:
            return NotStarted()
        if not self._is_held(run):
            return Lost()
        operation = self._operation(run)
        if run.lease is not None:
            self.keep_lease(run.hold, run.lease, partial(lose, operation))
        self._has_run = True
        self._limit = run.limit
        self._enter(operation)
        ending: Ending = await Handover()
        return ending

    async def run_unguarded(self, hold: Hold | None, lease: timedelta | None) -> Any:
        """Leave the flow, for Django to call the view as if it were not guarded."""
        if hold is not None and lease is not None:
            self.keep_lease(hold, lease)
        return await Handover()

    def _steps(self, store: Any) -> Callable[[], Steps]:
        return partial(guards.DjangoSteps, is_recorded=not isinstance(store, Unrecorded))

    def conclude(self, response: Response) -> Response:
        """Store what the view has answered; return what is to be sent."""
        if self._is_unrecorded:
            self._leave(self.error)
            return response
        try:
            if self.operation is None:
                self._flow.resume(None if self.error else response.status_code)
                return response
            self._leave(self.error)
            ending = self._ending(self.operation, response)
            answer = getattr(ending, "answer", None)
            reply = self._flow.resume(ending)
        except BaseException:
            self.abandon()
            raise
        finally:
            self.let_go()
        if isinstance(reply, Reraise) and not self.is_told:
            if reply.answer is None:
                raise reply.error
            self._view.report(reply.error)
        if isinstance(reply, Send | Reraise) and reply.answer is not None and reply.answer is not answer:
            # For what was raised, too, so that this client and its retries see the same.
            return self._view.response_of(reply.answer)
        return response

    def not_started(self) -> None:
        """Let go of the key: its view was never called."""
        self._leave(None)
        if self._is_unrecorded:
            return
        try:
            self._flow.resume(NotStarted() if self.operation is not None else None)
        finally:
            self.let_go()

    def abandon(self) -> None:
        """Leave nothing open. What the view did is not known, and its lease decides."""
        self._leave(SystemExit())
        if self._transaction is not None:
            self._transaction.perform(Undo())
        self.let_go()

    def _ending(self, operation: Operation, response: Response) -> Ending:
        if self.error is not None and response.status_code >= FIRST_SERVER_ERROR:
            return raised(self.error, operation)
        try:
            return self._view.take(response, self.limits(self._limit, operation)).ending(operation)
        except Exception as error:  # noqa: BLE001 - a stream that broke; it is the flow's to judge
            self.is_told = False
            return raised(error, operation)

    def _enter(self, operation: Operation) -> None:
        self.operation = operation
        self._open.enter_context(_current(operation))
        if self._policy.mode == "atomic":
            self._open.enter_context(atomicity.Inner())

    def _leave(self, error: BaseException | None) -> None:
        self._open.__exit__(type(error) if error else None, error, None)


@contextmanager
def _current(operation: Operation) -> Iterator[None]:
    """Make *operation* the current one. Between an async project's threads and its loop, contexts are copied."""
    entered = enter(operation)
    entered.__enter__()
    try:
        yield
    finally:
        try:
            entered.__exit__(None, None, None)
        except ValueError:
            leave()


def _start(request: Request, ports: MiddlewarePorts) -> Response | None:
    response = ports.start()
    if ports.is_under_way:
        setattr(request, _PORTS, ports)
    elif response is not None:
        setattr(request, _ANSWER, response)
    return response


def _end(request: Request, response: Response) -> Response:
    ports: MiddlewarePorts | None = request.__dict__.pop(_PORTS, None)
    return _answer(request, response) if ports is None else ports.conclude(response)


def _answer(request: Request, response: Response) -> Response:
    """Return what we have answered, as it was; it has what those between us and the view once made of it."""
    return request.__dict__.pop(_ANSWER, response)


def _take_back(request: Request) -> None:
    """Free the key of a request that was cancelled while it was being claimed."""
    ports: MiddlewarePorts | None = request.__dict__.pop(_PORTS, None)
    if ports is not None:
        ports.not_started()


def _abandon(request: Request, error: BaseException) -> None:
    ports: MiddlewarePorts | None = request.__dict__.pop(_PORTS, None)
    if ports is None:
        return
    if isinstance(error, Exception):
        # Under DEBUG_PROPAGATE_EXCEPTIONS. Django gives no answer to it, and goes on raising it.
        ports.error = error
        ports.conclude(HttpResponse(status=FIRST_SERVER_ERROR))
    else:
        # A view that was cancelled, too: the loop has ended, or it awaited what was.
        ports.abandon()


def _django_calls_it() -> Response:
    raise AssertionError("Django calls the view.")  # pragma: no cover - it is never called
