"""The decorator, and the check of an app's routes for a misplaced one. It opens no store."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial, wraps
from inspect import signature
from typing import Any, TypeVar, overload

from semel.core.policy import Policy
from semel.errors import ConfigurationError
from semel.flask.view import FlaskView
from semel.guard.request import check_modes, switched
from semel.guard.views import ViewPorts
from semel.stores import Store

try:
    from flask import Flask, Request, current_app, request
except ImportError as error:  # pragma: no cover - seen only where the extra is missing
    raise ImportError("semel.flask needs Flask 3. Run: pip install 'semel[flask]'") from error

#: Where an app keeps what ``Semel`` gave it: ``app.extensions["semel"]``.
EXTENSION = "semel"

#: Marks a guarded view, and, by ``functools.wraps``, every decorator around it.
_GUARD = "__semel_guard__"
#: Marks the function inside, which must not be registered without its guard.
_INSIDE = "__semel_inside__"
#: In the environ of a request: whether a guarded view is running for it (True) or has run (False).
_RUNNING = "semel.running"

V = TypeVar("V", bound=Callable[..., Any])
Scope = Callable[..., Any]
NamesUser = Callable[[Request], object]
#: A policy, the name of a preset, or what differs from ``Policy.ietf()``.
GivenPolicy = Policy | str | Mapping[str, Any]

_NO_SCOPE = (
    "{} needs a scope, a function that returns the user: Semel(app, scope=lambda: current_user.get_id()), or "
    "@idempotent(scope=…). For an API with one user, say so: scope=semel.SINGLE_TENANT."
)
_PRESETS = {"ietf": Policy.ietf, "stripe": Policy.stripe}


@dataclass(frozen=True, slots=True, eq=False)
class Guarding:
    """The settings of one ``@idempotent``. None: those of the app."""

    name: str
    policy: Policy | None
    scope: NamesUser | None


@overload
def idempotent(view: V, /) -> V: ...
@overload
def idempotent(*, policy: GivenPolicy | None = None, scope: Scope | None = None) -> Callable[[V], V]: ...


def idempotent(
    view: Callable[..., Any] | None = None, /, *, policy: GivenPolicy | None = None, scope: Scope | None = None
) -> Callable[..., Any]:
    """Guard a view: below ``@app.post`` and the login, which run first. *policy* and *scope* are the app's by default.

    For functions, async ones too; for the methods of a ``MethodView``, and its ``decorators``.
    """
    if view is None:
        return partial(_guarded, policy=policy_of(policy) if policy is not None else None, scope=asked(scope))
    return _guarded(view, policy=None, scope=None)


def _guarded(view: Callable[..., Any], *, policy: Policy | None, scope: NamesUser | None) -> Callable[..., Any]:
    if not callable(view):
        raise ConfigurationError(f"@idempotent guards a view, not {view!r}. Settings are named: policy=…, scope=….")
    guarding = Guarding(getattr(view, "__qualname__", repr(view)), policy, scope)

    @wraps(view)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        return _serve(guarding, partial(current_app.ensure_sync(view), *args, **kwargs))

    setattr(guarded, _GUARD, guarding)
    with suppress(AttributeError):  # Not every callable has attributes.
        setattr(view, _INSIDE, guarding)
    return guarded


def _serve(guarding: Guarding, view: Callable[[], Any]) -> Any:
    installed = current_app.extensions.get(EXTENSION)
    if installed is None:
        raise ConfigurationError(
            f"{guarding.name} is guarded, and its app has no store: use Semel(app, store=…, scope=…) or, in a factory, "
            "semel.init_app(app)."
        )
    policy = switched(guarding.policy or installed.policy)
    # A guarded view that calls another one is one operation.
    is_running = request.environ.get(_RUNNING)
    if request.method not in policy.methods or is_running:
        return view()
    scope = guarding.scope or installed.scope
    if scope is None:
        raise ConfigurationError(_NO_SCOPE.format(guarding.name))
    if is_running is False:
        raise ConfigurationError(
            f"{guarding.name} is the second guarded view that is called for one request, which has one key and one "
            "answer. Guard the view that calls them both."
        )
    request.environ[_RUNNING] = True
    try:
        return ViewPorts(installed.guard, policy, FlaskView(view, scope, installed.undo)).serve()
    finally:
        request.environ[_RUNNING] = False


def policy_of(given: GivenPolicy | None) -> Policy:
    """Return the policy that *given* stands for, if it works in Flask."""
    if given is None or isinstance(given, str):
        preset = _PRESETS.get(given or "ietf")
        policy = preset() if preset else None
    else:
        policy = Policy.ietf(**given) if isinstance(given, Mapping) else given
    if not isinstance(policy, Policy):
        raise ConfigurationError(
            f'policy must be a Policy, "ietf", "stripe", or a dict of what differs from Policy.ietf(), not {given!r}.'
        )
    if policy.store_request or policy.may_accept:
        field = "store_request=True" if policy.store_request else "A policy that accepts requests to be run later"
        raise ConfigurationError(
            f"{field} needs the whole app, to run a stored request again without its client: use "
            "semel.wsgi.IdempotencyMiddleware around app.wsgi_app."
        )
    return policy


def asked(scope: Scope | None) -> NamesUser | None:
    """Return *scope* as a function of the request, also if it takes no argument."""
    if scope is None:
        return None
    wants_request = _can_be_called(scope, None)
    if not wants_request and not _can_be_called(scope):
        raise ConfigurationError(
            "scope must be a function of the request or of nothing, such as lambda: current_user.get_id(). "
            f"This is not: {scope!r}."
        )

    def principal(request: Request) -> object:
        ask = current_app.ensure_sync(scope)
        return ask(request) if wants_request else ask()

    return principal


def _can_be_called(function: object, *args: object) -> bool:
    if not callable(function):
        return False
    try:
        signature(function).bind(*args)
    except TypeError:
        return False
    except ValueError:  # It is written in C, and has no signature.
        pass
    return True


def check_routes(app: Flask, policy: Policy, scope: NamesUser | None, store: Store) -> None:
    """Raise ``ConfigurationError`` for a misplaced guard. *policy*, *scope* and *store* are the app's."""
    views = app.view_functions
    guards = {each for view in views.values() if (each := getattr(view, _GUARD, None))}
    for endpoint, view in views.items():
        guarding: Guarding | None = getattr(view, _GUARD, None)
        if guarding is None:
            inside: Guarding | None = getattr(view, _INSIDE, None)
            if inside is not None and inside not in guards:
                raise ConfigurationError(
                    f"{endpoint}: {inside.name} is registered without its guard. Write @idempotent below @app.post(…), "
                    "right above the function."
                )
            continue
        if guarding.scope is None and scope is None:
            raise ConfigurationError(_NO_SCOPE.format(guarding.name))
        check_modes(store, [guarding.policy or policy])
        taken = [rule.methods for rule in app.url_map.iter_rules(endpoint)]
        guarded = (guarding.policy or policy).methods
        if all(methods is not None and methods.isdisjoint(guarded) for methods in taken):
            raise ConfigurationError(
                f"{endpoint}: {guarding.name} is guarded, and takes none of {', '.join(sorted(guarded))}. Remove "
                "@idempotent, or give it a policy with the view's methods."
            )
