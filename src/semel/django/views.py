"""The decorator ``idempotent``: it guards one view, after the decorators outside of it have let the request pass.

    @idempotent                                     # by what the settings say
    @idempotent(policy=Policy.ietf(mode="atomic"), scope=lambda request: request.user.account_id)

It is for Django views, sync and async, functions and methods. For REST framework's views there is ``rest.py``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, TypeVar, overload

from asgiref.sync import iscoroutinefunction, sync_to_async
from django.core.handlers.asgi import ASGIRequest
from django.core.handlers.exception import response_for_exception
from django.http import StreamingHttpResponse

from semel.core.commands import Again
from semel.core.fingerprint import Buffer
from semel.core.handler import TooManyWaiters, Wait
from semel.core.message import Answer
from semel.core.policy import Policy
from semel.core.record import Found
from semel.django import atomicity, conf, guards
from semel.django.messages import (
    STATUSES,
    DjangoRequest,
    Request,
    Response,
    async_taken,
    checked,
    claim,
    is_unrendered,
    release,
    taken,
)
from semel.django.waiting import close_connections, to_the_end
from semel.errors import ConfigurationError
from semel.flows.reply import Reply, Reraise
from semel.guard.body import Limits
from semel.guard.request import switched
from semel.guard.views import AsyncView, AsyncViewPorts, Taken, View, ViewPorts
from semel.guard.waiting import MAX_THREADS
from semel.operation import Steps
from semel.stores.forks import importing
from semel.stores.leases import Leases
from semel.stores.unrecorded import Unrecorded

ANSWERED = tuple(kind for kinds, _ in STATUSES for kind in kinds)

#: The mark of a view with a guard of its own: a ``Choice``. The middleware does not guard it.
MARK = "semel_guard"

Scope = Callable[[Any], Any]
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Choice:
    """The policy and the scope of a guarded view; None is what the settings say."""

    policy: Policy | None = None
    scope: Scope | None = None

    def __post_init__(self) -> None:
        """Check both at import, where they are written."""
        policy: object = self.policy
        if policy is not None and not isinstance(policy, Policy):
            raise ConfigurationError(f"policy must be a Policy, such as Policy.ietf(), not {policy!r}.")
        if self.scope is not None and not callable(self.scope):
            raise ConfigurationError(
                "scope must be a function that returns the user of a request: "
                f"scope=lambda request: request.user.account_id, not {self.scope!r}."
            )

    def policy_for(self, method: str) -> Policy | None:
        """Return the policy of a request, or None if it is not guarded."""
        policy = conf.settings().policy if self.policy is None else self.policy
        return guards.checked(switched(policy)) if method in policy.methods else None

    def principal(self, request: Request) -> object:
        """Return the user of *request*, for a view in a thread."""
        return self._settings().principal(request)

    async def aprincipal(self, request: Request) -> object:
        """Return the same for a view on an event loop."""
        return await self._settings().aprincipal(request)

    def _settings(self) -> conf.Settings:
        said = conf.settings()
        return said if self.scope is None else dataclasses.replace(said, scope=self.scope)


class DjangoView(DjangoRequest, View[Response]):
    """One request to a view, and the view."""

    def __init__(self, request: Request, call: Callable[[], Response], choice: Choice) -> None:
        """Guard *call*, which may raise exceptions that Django answers."""
        super().__init__(request)
        self._call = call
        self._choice = choice

    def principal(self) -> object:
        """Ask the application."""
        return self._choice.principal(self.request)

    def read_body(self, limit: int) -> Buffer | None:
        """Read the body, and keep it for the view."""
        return self.whole_body(limit)

    def call(self) -> Response:
        """Call the view, and render what it returns."""
        try:
            response = self._call()
        except ANSWERED as error:
            response = response_for_exception(self.http, error)
        return response.render() if is_unrendered(response) else response

    def call_unguarded(self) -> Response:
        """Call the view; Django and its middleware do the rest."""
        return self._call()

    def take(self, response: Response, limits: Limits) -> Taken:
        """Return the part of the response that can be kept."""
        return taken(response, limits, on_a_loop=hasattr(self.http, "scope"))


class AsyncDjangoView(DjangoRequest, AsyncView[Response]):
    """The same on an event loop."""

    def __init__(self, request: Request, call: Callable[[], Any], choice: Choice) -> None:
        """Guard *call*, as in a sync view."""
        super().__init__(request)
        self._call = call
        self._choice = choice

    async def principal(self) -> object:
        """Ask the application."""
        return await self._choice.aprincipal(self.request)

    async def read_body(self, limit: int) -> Buffer | None:
        """Read the body, which Django has received already, and keep it for the view."""
        return self.whole_body(limit)

    async def call(self) -> Response:
        """Call the view, and render what it returns."""
        try:
            response = await self._call()
        except ANSWERED as error:
            response = await sync_to_async(response_for_exception, thread_sensitive=False)(self.http, error)
        return await sync_to_async(response.render)() if is_unrendered(response) else response

    async def call_unguarded(self) -> Response:
        """Call the view, as in a sync view."""
        response: Response = await self._call()
        return response

    async def take(self, response: Response, limits: Limits) -> Taken:
        """Return the part of the response that can be kept."""
        return await async_taken(response, limits)


class AsyncDjangoPorts(AsyncViewPorts[Response]):
    """One request to an async view. Its steps may be taken in plain functions, too."""

    _view: AsyncDjangoView

    def _steps(self, store: Any, leases: Leases | None = None) -> Callable[[], Steps]:
        return partial(guards.DjangoSteps, leases, is_recorded=not isinstance(store, Unrecorded))

    async def wait(self, wish: Wait) -> Found | Again | TooManyWaiters:
        """Wait for another request to end, with no connection open meanwhile."""
        await close_connections()
        if wish.max_waiters is None and not isinstance(self._view.http, ASGIRequest):
            # Under WSGI the loop belongs to this request, and its thread waits, too.
            wish = dataclasses.replace(wish, max_waiters=MAX_THREADS)
        return await super().wait(wish)

    async def _give(self, reply: Reply) -> Response:
        if isinstance(reply, Reraise) and reply.answer is not None:
            # A receiver of the error may send mail, or query the database: not on a loop.
            return await sync_to_async(self._report, thread_sensitive=False)(reply.error, reply.answer)
        return await super()._give(reply)

    def _report(self, error: Exception, answer: Answer) -> Response:
        self._view.report(error)
        return self._view.response_of(answer)


@overload
def idempotent(view: F) -> F: ...


@overload
def idempotent(*, policy: Policy | None = None, scope: Scope | None = None) -> Callable[[F], F]: ...


def idempotent(view: Any = None, *, policy: Policy | None = None, scope: Scope | None = None) -> Any:
    """Guard *view* by *policy*; *scope* returns the user of a request. Without them the settings apply."""
    choice = Choice(policy, scope)
    return partial(_guarded, choice) if view is None else _guarded(choice, view)


def choice_of(view: Any) -> Choice | None:
    """Return the mark of a guarded *view*, or of the function inside ``@api_view``."""
    made = getattr(view, "cls", None)
    if made is None:
        return _choice(view)
    handlers = [getattr(made, name, None) for name in getattr(made, "http_method_names", ())]
    cells = [cell.cell_contents for each in handlers for cell in getattr(each, "__closure__", None) or ()]
    return next((choice for each in (view, *cells) if (choice := _choice(each)) is not None), None)


def _choice(view: Any) -> Choice | None:
    found = getattr(view, MARK, None)
    return found if isinstance(found, Choice) else None


def _guarded(choice: Choice, view: Any) -> Any:
    _refuse(view)
    guards.GATE.close_on_sigterm()
    guarded: Any
    if _is_async(view):

        @wraps(view)
        async def guarded(request: Request, *args: Any, **kwargs: Any) -> Response:
            policy = choice.policy_for(request.method)
            blocks = atomicity.AsyncBlocks(atomicity.opted_out(guarded, request), policy)

            async def call() -> Response:
                async with blocks:
                    return checked(await view(request, *args, **kwargs), view)

            if policy is None or not claim(request):
                return await call()
            try:
                ports = AsyncDjangoPorts(guards.async_guard(), policy, AsyncDjangoView(request, call, choice))
                return await to_the_end(ports.serve(), wake=ports.leave)
            finally:
                release(request)

    else:

        @wraps(view)
        def guarded(request: Request, *args: Any, **kwargs: Any) -> Response:
            if hasattr(request, "_request"):  # REST framework's, from @api_view
                return _by_rest_framework(choice, view, request, *args, **kwargs)
            policy = choice.policy_for(request.method)

            def call() -> Response:
                with atomicity.blocks(atomicity.opted_out(guarded, request), policy):
                    return checked(view(request, *args, **kwargs), view)

            if policy is None or not claim(request):
                return call()
            try:
                return ViewPorts(guards.guard(), policy, DjangoView(request, call, choice)).serve()
            finally:
                release(request)

    atomicity.see_to(guarded)
    setattr(guarded, MARK, choice)
    return guarded


def _by_rest_framework(choice: Choice, view: Any, request: Request, *args: Any, **kwargs: Any) -> Response:
    with importing:
        from semel.django.rest import serve  # noqa: PLC0415 - where it is not installed, there is no such request

    return serve(request.parser_context["view"], partial(view, request, *args, **kwargs), request, choice)


def _is_async(view: Any) -> bool:
    # as_view() marks an async class as async; its dispatch() is a plain function that returns a coroutine.
    return iscoroutinefunction(view) or bool(getattr(_instance_of(view), "view_is_async", False))


def _instance_of(view: Any) -> Any:
    """Return the object of the method *view*, as ``method_decorator`` passes it."""
    function = view.func if isinstance(view, partial) else view
    return getattr(function, "__self__", None)


def _refuse(view: Any) -> None:
    """Raise at import if a guard on *view* can't work as intended."""
    if not callable(view):
        raise ConfigurationError(
            f"@idempotent guards a view, and {view!r} is not a view. Its arguments have names: policy=, scope=."
        )
    if isinstance(view, type):
        raise ConfigurationError(
            f"@idempotent guards a function. For a class, write @method_decorator(idempotent, name='dispatch') "
            f"above {view.__name__}; for one of REST framework's, derive it from semel.django.rest.IdempotentMixin."
        )
    if hasattr(view, "cls") or hasattr(_instance_of(view), "initialize_request"):
        raise ConfigurationError(conf.LOGS_IN_INSIDE)
    if hasattr(view, MARK):
        raise ConfigurationError("This view is guarded already.")
    said = getattr(view, "__annotations__", {}).get("return")
    if said is StreamingHttpResponse or said == StreamingHttpResponse.__name__:
        raise ConfigurationError(
            f"{getattr(view, '__qualname__', view)} answers with a stream, and a stream can't be replayed. Leave it "
            "unguarded; or, if the stream is small, annotate it to return HttpResponseBase."
        )
