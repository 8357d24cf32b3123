"""The dependency that guards a route. ``order.py`` makes it run after every other dependency."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any
from uuid import UUID

from fastapi import Depends, HTTPException
from fastapi.params import Depends as Dependency
from starlette.requests import HTTPConnection

from semel.asgi.protocol import EXCHANGE, full_path, head_of
from semel.asgi.route import RoutePorts, Settled, claim
from semel.core.message import Answer
from semel.core.policy import Policy
from semel.core.scope import SingleTenant
from semel.errors import ConfigurationError, NotGuarded
from semel.guard.request import RequestView
from semel.operation import Operation, current

_NO_SCOPE = (
    "Idempotent(scope=…) needs the user of a request: give it the dependency that your routes log in with, "
    "returning a string such as account.id. For an API with one user, say so: scope=semel.SINGLE_TENANT."
)
_OUT_OF_ORDER = (
    "This route is guarded, and Semel has not found it: a replay could be given before the app's other dependencies "
    "have run. Call semel.fastapi.install(app, store=…). An app that is wrapped in something else before it is mounted "
    "can't be inspected, and needs its own install."
)


class AlreadyAnswered(HTTPException):
    """The request has its answer already: a replay, or a refusal. That answer is sent, and the response of an exception
    handler to this is discarded. The status is for middleware that logs or counts it.
    """

    def __init__(self, answer: Answer) -> None:
        """Have the status of *answer*."""
        super().__init__(answer.status, "The answer has been given.")


class Idempotent:
    """A dependency: the route runs once for each key, and its value is the ``Operation`` (None: there is no key).

    *scope* is the dependency that returns the user: a string, an int, a UUID or a tuple of them. It may also be
    ``SINGLE_TENANT``, or a function of one ``RequestView``, as for the middleware. Without *policy*, that of
    ``install`` applies.

    ``Idempotent()`` guards nothing: it returns the operation in an app that a middleware guards as a whole.
    """

    def __init__(self, *, scope: Any = None, policy: Policy | None = None) -> None:
        """Guard requests by *policy*, with *scope* as their user."""
        if policy is not None and not isinstance(policy, Policy):
            raise ConfigurationError(f"policy must be a Policy, such as Policy.ietf(), not {policy!r}.")
        self.is_bare = scope is None
        if scope is None and policy is not None:
            raise ConfigurationError(_NO_SCOPE)
        if scope is not None and not callable(scope) and not isinstance(scope, Dependency):
            raise ConfigurationError(_NO_SCOPE)
        self.policy = policy
        self._asks = scope if takes_a_view(scope) else None
        parameters = [parameter("connection", HTTPConnection)]
        if scope is not None and self._asks is None:
            depends = scope if isinstance(scope, Dependency) else Depends(scope)
            parameters.append(parameter("principal", Annotated[Any, depends]))
        #: FastAPI reads the parameters here, and so resolves the login as in every other route.
        self.__signature__ = inspect.Signature(parameters)

    async def __call__(
        self, connection: HTTPConnection, principal: object = None, *, is_last: bool = False
    ) -> Operation | None:
        """Claim the key. FastAPI calls this; ``order.py`` makes sure that it *is last*."""
        scope = connection.scope
        if scope["type"] != "http":
            return None  # A WebSocket, on a router with guarded routes.
        if self.is_bare:
            return _handed_out(connection)
        if not is_last and _could_be(connection):
            raise ConfigurationError(_OUT_OF_ORDER)
        named = checked_principal(principal) if self._asks is None else partial(ask, self._asks, connection)
        try:
            return await claim(scope, named, self.policy)
        except Settled as settled:
            raise AlreadyAnswered(settled.answer) from None


async def ask(asks: Callable[[RequestView], Any], connection: HTTPConnection) -> Principal:
    """Call a function of one ``RequestView`` for the user of a request. A guard calls it only if there is a key."""
    scope = connection.scope
    said = asks(RequestView.of(head_of(scope), full_path(scope), scope))
    return checked_principal(await said if inspect.isawaitable(said) else said)


def _could_be(connection: HTTPConnection) -> bool:
    """Whether the guard of this request should have been put last."""
    # With an override, FastAPI rebuilds every dependency, without this order. Only tests have overrides.
    return isinstance(connection.scope.get(EXCHANGE), RoutePorts) and not connection.app.dependency_overrides


def _handed_out(connection: HTTPConnection) -> Operation | None:
    if isinstance(connection.scope.get(EXCHANGE), RoutePorts):
        raise ConfigurationError(f"Idempotent() is for an app that a middleware guards as a whole. {_NO_SCOPE}")
    try:
        return current()
    except NotGuarded:
        return None


#: The name of an account: one string, or several. None: the request has no user.
Principal = str | tuple[str | None, ...] | None


def checked_principal(principal: object) -> Principal:
    """Return *principal* as strings. Without a user it is None, and the claim refuses it."""
    return tuple(map(_checked, principal)) if isinstance(principal, tuple) else _checked(principal)


def _checked(principal: object) -> str | None:
    if principal is None or isinstance(principal, str):
        return principal
    if isinstance(principal, int | UUID) and not isinstance(principal, bool):
        return str(principal)
    raise ConfigurationError(
        f"scope must return a string, an int, a UUID, or a tuple of them, not {type(principal).__name__}. "
        "Give Idempotent a dependency that returns account.id, or another lasting name of the account."
    )


def takes_a_view(scope: Any) -> bool:
    """Whether *scope* takes a ``RequestView``, and is not a dependency.

    It then has one parameter, with that annotation or with none. For FastAPI the latter would be a query parameter,
    and no login works by one.
    """
    if isinstance(scope, SingleTenant):
        return True
    if not inspect.isroutine(scope):
        return False
    try:
        parameters = list(inspect.signature(scope, eval_str=True).parameters.values())
    except (NameError, ValueError):
        return False
    if len(parameters) != 1 or parameters[0].default is not inspect.Parameter.empty:
        return False
    return parameters[0].annotation in {inspect.Parameter.empty, RequestView}


def parameter(name: str, annotation: Any) -> inspect.Parameter:
    """Return a parameter in the form that FastAPI reads from a dependency."""
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation)
