"""The routes of a FastAPI app, with its routers and mounted apps, and the guard of each. It changes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import fastapi.routing
from fastapi.dependencies.models import Dependant
from starlette.routing import BaseRoute, Host, Mount

from semel.core.policy import Policy
from semel.fastapi.dependency import Idempotent
from semel.stores import AsyncStore

#: In newer FastAPI, which keeps included routers; older versions copied their routes into the app.
_contexts: Any = getattr(fastapi.routing, "iter_route_contexts", None)


@dataclass(frozen=True, slots=True)
class Installed:
    """The settings of an install for all routes of its app."""

    #: The policy of guards without one.
    policy: Policy
    store: AsyncStore
    #: Whether there is a status route, so that requests may be accepted.
    tells_status: bool = False


@dataclass(frozen=True, slots=True)
class Guarded:
    """A route that has an ``Idempotent`` among its dependencies."""

    route: Any
    dependant: Dependant
    guards: tuple[Idempotent, ...]

    @property
    def methods(self) -> frozenset[str]:
        """The methods of the route."""
        return frozenset(self.route.methods or ())

    @property
    def says_so_itself(self) -> bool:
        """Whether its own function has the guard as a parameter; otherwise it may belong to a whole router."""
        return any(each.name is not None and isinstance(each.call, Idempotent) for each in self.dependant.dependencies)

    def __str__(self) -> str:
        """Return its methods and path."""
        return f"{' '.join(sorted(self.methods))} {self.route.path}"


def guarded_routes(routes: Sequence[BaseRoute]) -> Iterator[Guarded]:
    """Yield the guarded ones of these *routes*, and not those of mounted apps."""
    for route in all_routes(routes):
        dependant = getattr(route, "dependant", None)
        if isinstance(dependant, Dependant) and hasattr(route, "methods"):
            guards = tuple(dict.fromkeys(guards_of(dependant)))
            if guards:
                yield Guarded(route, dependant, guards)


def guards_of(dependant: Dependant) -> Iterator[Idempotent]:
    """Yield every ``Idempotent`` that *dependant* needs, directly or through another dependency."""
    if isinstance(dependant.call, Idempotent):
        yield dependant.call
    for each in dependant.dependencies:
        yield from guards_of(each)


def mounted(routes: Sequence[BaseRoute], around: Installed) -> Iterator[tuple[Sequence[BaseRoute], Installed]]:
    """Yield *routes* and those of every app that is mounted among them, each with what is installed *around* it."""
    yield routes, around
    for route in all_routes(routes):
        inner = getattr(route, "original_route", route)
        if isinstance(inner, Mount | Host) and inner.routes:
            yield from mounted(inner.routes, _installed_on(inner.app) or around)


def lists(routes: Sequence[BaseRoute]) -> Iterator[Sequence[BaseRoute]]:
    """Yield every list that a route can be added to later: the app's, its routers' and its mounted apps'."""
    yield routes
    for route in routes:
        router = getattr(route, "original_router", None)
        if router is not None:
            yield from lists(router.routes)
        elif isinstance(route, Mount | Host) and route.routes:
            yield from lists(route.routes)


def _installed_on(app: object) -> Installed | None:
    """Return the settings of *app*'s own install, if it has one: they apply wherever it is mounted."""
    for each in getattr(app, "user_middleware", ()):
        if getattr(each.cls, "is_installed", False):
            given = each.kwargs
            tells_status = given["status_path"] is not None
            return Installed(given["policy"] or Policy.ietf(), given["store"], tells_status=tells_status)
    return None


def all_routes(routes: Sequence[BaseRoute]) -> Iterator[Any]:
    """Yield *routes* with those of included routers, and not those of mounted apps."""
    return iter(_contexts(routes) if _contexts is not None else routes)
