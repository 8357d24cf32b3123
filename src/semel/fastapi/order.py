"""The order of dependencies: a route's guard is the last of them, wherever it is written.

A replay is an answer. If it were given before a permission check, a user who lost the permission could still read it;
so everything else that may refuse the request comes first. Nothing is decided about a key here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from fastapi.dependencies.models import Dependant
from starlette.routing import BaseRoute

from semel.asgi.route import NO_STATUS_ROUTE
from semel.core.replay import is_endless
from semel.errors import ConfigurationError
from semel.fastapi.dependency import Idempotent
from semel.fastapi.routes import Guarded, Installed, guarded_routes, guards_of, lists, mounted
from semel.guard.request import check_modes


class Order:
    """The guarded routes of one app, each processed once. A route that is added later is processed then."""

    def __init__(self, installed: Installed) -> None:
        """Use the policy of *installed* for routes without one of their own."""
        self._installed = installed
        self._lists: list[Sequence[BaseRoute]] = []
        self._lengths: list[int] = []

    def see(self, routes: Sequence[BaseRoute]) -> None:
        """Check and reorder *routes*, unless nothing was added since the last time."""
        if self._lengths and [len(each) for each in self._lists] == self._lengths:
            return
        for each, installed in mounted(routes, self._installed):
            settle(each, installed)
        # Last, so that a configuration error is raised on every request.
        self._lists = list(lists(routes))
        self._lengths = [len(each) for each in self._lists]


def settle(routes: Sequence[BaseRoute], installed: Installed) -> None:
    """Make the guard of each of *routes*, in an app with Semel *installed*, the last dependency."""
    for guarded in guarded_routes(routes):
        _check(guarded, installed)
        guards = list(_guards(guarded.dependant))
        if any(each.call is _in_order for each in guards[0].dependencies):
            continue  # It was reordered when another route was added.
        if len(guards) > 1:
            _hoist(guarded.dependant)
        _put_last(guarded.dependant)
        for guard in guards:
            guard.dependencies = [*_gates(guarded.dependant, guard), *guard.dependencies]


def _check(guarded: Guarded, installed: Installed) -> None:
    """Raise if a guard can't work as intended."""
    if len(guarded.guards) > 1:
        raise ConfigurationError(f"{guarded}: a route is guarded once, and this one has {len(guarded.guards)} guards.")
    (guard,) = guarded.guards
    if guard.is_bare:
        return  # Idempotent() itself raises if it is misplaced.
    policy = guard.policy or installed.policy
    check_modes(installed.store, [policy])
    if policy.may_accept and not installed.tells_status:
        raise ConfigurationError(f"{guarded}: {NO_STATUS_ROUTE}")
    is_ever_guarded = bool(guarded.methods.intersection(policy.methods))
    if guarded.says_so_itself and not is_ever_guarded:
        raise ConfigurationError(
            f"{guarded}: its policy guards {' and '.join(sorted(policy.methods))} only, so this route is not guarded. "
            "Remove Idempotent from it, or name its method in Policy(methods=…); GET is never guarded."
        )
    if is_ever_guarded and _never_ends(guarded.route):
        raise ConfigurationError(
            f"{guarded}: it answers with an endless stream, which can't be kept for a retry. "
            "Guard the route that starts the work, and stream from another."
        )


def _never_ends(route: object) -> bool:
    response_class = getattr(route, "response_class", None)
    # FastAPI wraps a default that the route did not set.
    response_class = getattr(response_class, "value", response_class)
    media_type = getattr(response_class, "media_type", None) or ""
    return is_endless(((b"content-type", str(media_type).encode()),))


def _put_last(dependant: Dependant) -> None:
    """Move the dependency that leads to the guard to the end, on every level down to the guard."""
    others = [each for each in dependant.dependencies if not any(guards_of(each))]
    holders = [each for each in dependant.dependencies if any(guards_of(each))]
    # A new list: a running request iterates over the old one.
    dependant.dependencies = others + holders
    for each in holders:
        _put_last(each)


def _hoist(dependant: Dependant) -> None:
    """If several dependencies need the guard, run first what stands beside the guard in each of them.

    Otherwise the first one would run the guard before the second one's other dependencies. FastAPI caches a
    dependency's result, and does not call it again at its old place.
    """
    beside = [replace(each, name=None) for each in _beside_the_guard(dependant) if each.use_cache]
    dependant.dependencies = beside + dependant.dependencies


def _beside_the_guard(dependant: Dependant) -> Iterator[Dependant]:
    for each in dependant.dependencies:
        if isinstance(each.call, Idempotent):
            continue
        if not any(guards_of(each)):
            yield each
        else:
            yield from _beside_the_guard(each)


def _guards(dependant: Dependant) -> Iterator[Dependant]:
    if isinstance(dependant.call, Idempotent):
        yield dependant
        return
    for each in dependant.dependencies:
        yield from _guards(each)


def _gates(dependant: Dependant, guard: Dependant) -> Iterator[Dependant]:
    """Yield dependencies for *guard* that fail if a header or cookie of another dependency is missing or wrong.

    FastAPI collects such errors, and goes on to the next dependency: a client without its ``X-Token`` would reach the
    guard. Path, query and body need no such check: a replay is for the same request.
    """
    yield Dependant(call=_in_order, name="is_last", path=dependant.path)
    for each in _others(dependant, guard):
        if each.header_params or each.cookie_params:
            yield Dependant(
                call=_in_order,
                name="is_last",
                path=dependant.path,
                header_params=each.header_params,
                cookie_params=each.cookie_params,
            )


def _others(dependant: Dependant, guard: Dependant) -> Iterator[Dependant]:
    if dependant is not guard:
        yield dependant
        for each in dependant.dependencies:
            yield from _others(each, guard)


async def _in_order(**_headers: object) -> bool:
    """Show the guard that it was put last."""
    return True
