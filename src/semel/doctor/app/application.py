"""An application, looked into from outside: its layers, its guards, their policies and scopes. Nothing is called that
serves a request, and nothing is changed.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from semel.core.policy import Policy
from semel.doctor.session import Session
from semel.errors import ConfigurationError

#: Attributes in which frameworks and middleware keep the app that they wrap.
_INSIDE = ("app", "wsgi_app", "middleware_stack", "application")
#: More layers than any app has: the search must end even if an app is wrapped around itself.
_MAX_LAYERS = 100
_FLASK_EXTENSION = "semel"
_FLASK_GUARD = "__semel_guard__"


@dataclass(frozen=True, slots=True)
class Guard:
    """One guard of Semel's."""

    name: str
    policies: tuple[Policy, ...]
    #: What names the user of a request; None where each route says so for itself.
    scope: Any = None
    #: Whether this process runs the services, too.
    works: bool = False
    is_per_route: bool = False


@dataclass(slots=True)
class Application:
    """What was found."""

    name: str
    guards: list[Guard] = field(default_factory=list)
    #: The layers around and inside Semel's middleware, outermost first: the full names of their classes.
    layers: tuple[str, ...] = ()
    #: Where Semel's own is among them; None: it is not.
    place: int | None = None
    #: The store object of the first guard.
    store: Any = None
    is_django: bool = False
    #: The routes that log in by themselves, inside of a guard that does not know whom.
    own_logins: tuple[str, ...] = ()
    #: What has a session of the store's own engine beside the transaction of atomic mode, and where.
    sessions: list[str] = field(default_factory=list)
    #: The function at which the layers end, if it is one.
    end: str | None = None
    #: The session that the store is examined with, if there is one.
    session: Session | None = None
    #: The module that it was imported from, for what lies beside it.
    module: str = ""

    def __str__(self) -> str:
        """Name it."""
        return self.name

    @property
    def policies(self) -> tuple[Policy, ...]:
        """Every policy of every guard."""
        return tuple(policy for guard in self.guards for policy in guard.policies)


def opened_by(app: Any) -> Application:
    """Look into *app*: an ASGI or WSGI application, a FastAPI, Flask or Django one."""
    if not callable(app):
        raise ConfigurationError(f"{type(app).__name__} is no application: it can't be called.")
    found = Application(f"{type(app).__module__}.{type(app).__qualname__}", module=_module_of(app))
    layers = list(_layers(app))
    found.layers = tuple(_class_of(each) for each in layers)
    found.end = layers[-1].__qualname__ if inspect.isroutine(layers[-1]) else None
    for place, layer in enumerate(layers):
        if _is_middleware(layer):
            found.place = place
            found.store = layer.store
            found.guards.append(_of_middleware(layer))
            break
    for layer in layers:
        _add_routes(found, layer)
        if type(layer).__module__.startswith("django.core.handlers"):
            found.is_django = True
            _add_django(found)
    return found


def _layers(app: Any) -> Iterator[Any]:
    layer = app
    for _ in range(_MAX_LAYERS):
        yield layer
        inner: Any = None
        if getattr(layer, "middleware_stack", layer) is None:
            # Starlette builds its layers for the first request. Its own are left alone: more may be added to them.
            inner = layer.build_middleware_stack()
        else:
            inner = next((getattr(layer, name) for name in _INSIDE if callable(getattr(layer, name, None))), None)
        if inner is None or inner is layer:
            return
        # Of a method, such as Flask's wsgi_app, the object was seen already.
        if getattr(inner, "__self__", None) is layer:
            return
        layer = inner


def _is_middleware(layer: Any) -> bool:
    return any(
        each.__module__ in {"semel.asgi.middleware", "semel.wsgi.middleware"}
        and each.__name__ == "IdempotencyMiddleware"
        for each in type(layer).__mro__
    )


def _of_middleware(layer: Any) -> Guard:
    scope = layer.guard.scope
    is_per_route = type(scope).__name__ == "PerRoute"
    return Guard(
        type(layer).__name__,
        layer.routes.policies,
        None if is_per_route else scope,
        works=layer.workers is not None,
        is_per_route=is_per_route,
    )


def _add_routes(found: Application, layer: Any) -> None:
    """Add the guards of single routes: of FastAPI's dependencies, and of Flask's decorators."""
    if "fastapi" in sys.modules and hasattr(layer, "routes") and hasattr(layer, "user_middleware"):
        from semel.doctor.app.routes import add_routes  # noqa: PLC0415 - it needs FastAPI

        add_routes(found, layer.routes)
    extensions = getattr(layer, "extensions", None)
    if isinstance(extensions, dict) and _FLASK_EXTENSION in extensions:
        installed = extensions[_FLASK_EXTENSION]
        found.store = found.store or installed.store
        works = installed.workers is not None
        for endpoint, view in layer.view_functions.items():
            guarding = getattr(view, _FLASK_GUARD, None)
            if guarding is not None:
                policy = guarding.policy or installed.policy
                scope = guarding.scope or installed.scope
                if scope is None:
                    raise ConfigurationError(
                        f"Each request to {endpoint} fails: it has no scope, a function that returns the user. Write "
                        "Semel(app, scope=…) or @idempotent(scope=…)."
                    )
                scope = _asked(scope)
                found.guards.append(Guard(endpoint, (policy,), scope, works=works, is_per_route=True))


def _add_django(found: Application) -> None:
    from django.conf import settings  # noqa: PLC0415 - where a Django app is, Django is
    from django.core.exceptions import ImproperlyConfigured  # noqa: PLC0415 - as above

    from semel.django import checks, conf  # noqa: PLC0415 - as above

    if "semel.django" not in settings.INSTALLED_APPS:
        return
    said, _ = conf.read(getattr(settings, conf.NAME, {}))
    with suppress(ConfigurationError, ImproperlyConfigured):  # app-django says why.
        opened = said.opened()
        if said.store is not None or opened.dialect is not None:  # That raises where Django's is none that is known.
            found.store = found.store or opened
    found.guards.append(Guard("SEMEL", said.policies, None if said.scope is conf.user_scope else said.scope))
    found.own_logins = tuple(checks.own_logins(said))


def _asked(scope: Any) -> Any:
    """Return the application's own function, around which Flask's guard has one that calls it."""
    names = getattr(scope, "__code__", _asked.__code__).co_freevars
    inner = dict(zip(names, getattr(scope, "__closure__", None) or (), strict=True))
    return inner["scope"].cell_contents if "scope" in inner else scope


def _class_of(layer: Any) -> str:
    return f"{type(layer).__module__}.{type(layer).__qualname__}"


def _module_of(app: Any) -> str:
    return str(getattr(app, "import_name", "") or getattr(app, "__module__", "") or "")
