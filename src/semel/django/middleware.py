"""The middleware: it guards the views of a whole project, except those with a guard of their own.

The key is claimed when the URL is resolved and the ``process_view`` of the middleware above (CSRF, login) has let the
request pass. So an answer that is not a view's is never kept, and a replay passes the same checks. What is kept is the
answer of the view and of the middleware below this one. All of it happens in the thread in which Django runs the ORM
of the request, for sync and async views.
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
from semel.guard.measuring import measured
from semel.guard.ports import lose
from semel.guard.running import Handover, Split
from semel.guard.views import ViewPorts
from semel.operation import Operation, Steps, around, enter, leave
from semel.stores.leases import Leases
from semel.stores.unrecorded import Unrecorded

#: The attribute of a request that holds its ports, between the claim and the end.
_PORTS = "_semel_ports"
#: The attribute that holds Semel's own answer, given instead of the view's: middleware in between may change it.
_ANSWER = "_semel_answer"


class IdempotencyMiddleware:
    """Guards the paths in ``SEMEL["PATHS"]``. In ``MIDDLEWARE`` it comes after those that refuse requests."""

    sync_capable = True
    async_capable = True

    def __init__(self, get_response: Callable[[Request], Any]) -> None:
        """Pass requests on to *get_response*."""
        self.get_response = get_response
        self._is_async = iscoroutinefunction(get_response)
        if self._is_async:
            markcoroutinefunction(self)
            # So that unguarded requests need no switch to a thread and back.
            self.process_view = self._process_view  # type: ignore[method-assign]
        guards.GATE.close_on_sigterm()

    def policy_for(self, request: Request) -> Policy | None:
        """Return the policy of *request*, or None if it is not guarded. Override it for another choice."""
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
        """Claim the key of *request* before its *view* is called; or answer it."""
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
            # In the request's own thread, after a claim that may still be running there.
            await sync_to_async(_take_back)(request)
            raise
        return response

    def process_exception(self, request: Request, error: Exception) -> Response | None:
        """Note what the view raised, before Django makes a response of it and sends its signal."""
        ports: MiddlewarePorts | None = getattr(request, _PORTS, None)
        if ports is None:
            return None
        ports.error = error
        # Semel answers these. This placeholder is replaced by that answer on the way back.
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
    """One request, claimed before its view and ended after it. Django itself calls the view."""

    def __init__(self, policy: Policy, request: Request) -> None:
        """Nothing is begun yet."""
        view = DjangoView(request, _django_calls_it, Choice())
        super().__init__(guards.guard(), policy, view)
        #: What the view raised.
        self.error: Exception | None = None
        #: Whether Django has reported it.
        self.is_told = True
        self.operation: Operation | None = None
        self._limit = 0
        #: Whether the view has to be called now, and its answer passed to ``conclude``.
        self.is_under_way = False
        self._is_unrecorded = False
        #: The current operation, and in atomic mode the view's inner atomic block.
        self._open = ExitStack()
        notes, token = self.guard.store.notes_replays, os.urandom(16)
        self._flow = Split(
            measured(serve), cast("GuardPorts", self), view.head, policy, token, notes_replays=notes, around=around()
        )

    def start(self) -> Response | None:
        """Claim the key; return an answer if the view must not be called."""
        try:
            reply = self._flow.start()
        except BaseException:
            self.abandon()
            raise
        if isinstance(reply, Send):
            self.let_go()
            return self._view.response_of(reply.answer)
        if isinstance(reply, PassOn) and reply.unrecorded is not None:
            # The guard is switched off: the view runs within an operation, and its answer is not stored.
            self._open.enter_context(_current(self.unrecorded(reply.unrecorded)))
            self._is_unrecorded = self.is_under_way = True
        elif self._flow.is_left:
            self.is_under_way = True
        return None

    async def run_handler(self, run: RunHandler) -> Ending:
        """Leave the flow until Django has called the view."""
        if self.guard.gate.is_closed:
            return NotStarted()
        if not self._is_held(run):
            return Lost(has_run=False)
        operation = self._operation(run)
        if run.lease is not None:
            self.keep_lease(run.hold, run.lease, partial(lose, operation))
        self._has_run = True
        self._limit = run.limit
        self._enter(operation)
        ending: Ending = await Handover()
        return ending

    async def run_unguarded(self, hold: Hold | None, lease: timedelta | None) -> Any:
        """Leave the flow until Django has called the view unguarded."""
        if hold is not None and lease is not None:
            self.keep_lease(hold, lease)
        return await Handover()

    def _steps(self, store: Any, leases: Leases | None = None) -> Callable[[], Steps]:
        return partial(guards.DjangoSteps, leases, is_recorded=not isinstance(store, Unrecorded))

    def conclude(self, response: Response) -> Response:
        """Store the view's answer; return what has to be sent."""
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
            # After an exception, too, so that this client and its retries get the same.
            return self._view.response_of(reply.answer)
        return response

    def not_started(self) -> None:
        """Free the key: its view was never called."""
        self._leave(None)
        if self._is_unrecorded:
            return
        try:
            self._flow.resume(NotStarted() if self.operation is not None else None)
        finally:
            self.let_go()

    def abandon(self) -> None:
        """Close what is open. What the view did is not known, so the key stays taken until its lease ends."""
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
    """Make *operation* the current one. Contexts are copied between an async project's threads and its loop."""
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
    """Return Semel's own answer unchanged. A stored one already has the changes of the middleware in between."""
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
        # Under DEBUG_PROPAGATE_EXCEPTIONS Django makes no response, and raises it further.
        ports.error = error
        ports.conclude(HttpResponse(status=FIRST_SERVER_ERROR))
    else:
        # Also if the view was cancelled: the loop was closed, or it awaited a cancelled task.
        ports.abandon()


def _django_calls_it() -> Response:
    raise AssertionError("Django calls the view.")  # pragma: no cover - it is never called
