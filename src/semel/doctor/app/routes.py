"""The routes of a FastAPI app: their guards, their logins, and the sessions that they use. Nothing is called."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from fastapi.dependencies.models import Dependant
from fastapi.security.base import SecurityBase
from starlette.routing import BaseRoute, Mount

from semel.core.policy import Policy
from semel.core.scope import SingleTenant
from semel.doctor.app.application import Application, Guard
from semel.fastapi.routes import Guarded, all_routes, guarded_routes, guards_of


def add_routes(found: Application, routes: Sequence[BaseRoute]) -> None:
    """Add what there is to know of *routes* to what was *found* around them."""
    around = found.guards[0] if found.guards else None
    for guarded in guarded_routes(routes):
        for guard in guarded.guards:
            policies = () if guard.policy is None else (guard.policy,)
            found.guards.append(Guard(str(guarded), policies, _scope_of(guard), is_per_route=True))
            _add_sessions(found, guarded, policies or (() if around is None else around.policies))
    if around is not None and isinstance(around.scope, SingleTenant) and not around.is_per_route:
        found.own_logins = tuple(_logins(routes, around.policies))


def _logins(routes: Sequence[BaseRoute], policies: tuple[Policy, ...]) -> Iterator[str]:
    methods = frozenset(method for policy in policies for method in policy.methods)
    for route in all_routes(routes):
        dependant = getattr(route, "dependant", None)
        if not isinstance(dependant, Dependant) or methods.isdisjoint(getattr(route, "methods", None) or ()):
            continue
        if any(isinstance(each.call, SecurityBase) for each in _tree(dependant)):
            yield str(route.path)
    for mount in routes:
        if isinstance(mount, Mount):
            yield from (mount.path + each for each in _logins(mount.routes, policies))


def _add_sessions(found: Application, guarded: Guarded, policies: tuple[Policy, ...]) -> None:
    engine = _engine_of_store(found.store)
    if engine is None or all(policy.mode != "atomic" for policy in policies):
        return
    kept: list[Any] = []
    for each in _tree(guarded.dependant):
        # What depends on the guard comes after it, and has the operation's connection.
        function = _function_of(each.call)
        is_kept = inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function)
        if is_kept and function not in kept and not any(guards_of(each)) and engine in _engines_in(function):
            # A login and a route may have it in common.
            kept.append(function)
            found.sessions.append(f"{guarded}: the dependency {_name(function)} keeps one while the request lasts")
    if engine in _engines_in(guarded.route.endpoint):
        found.sessions.append(f"{guarded}: {_name(guarded.route.endpoint)} opens one")


def _tree(dependant: Dependant) -> Iterator[Dependant]:
    for each in dependant.dependencies:
        yield each
        yield from _tree(each)


def _function_of(call: Any) -> Any:
    """Return the function inside of a partial, or of an object that is called."""
    while isinstance(call, partial):
        call = call.func
    return call if inspect.isroutine(call) else type(call).__call__


def _engine_of_store(store: Any) -> Any:
    store = getattr(store, "durable", store)
    engine = getattr(getattr(store, "_connections", None), "_engine", None)
    return getattr(engine, "sync_engine", engine)


def _engines_in(function: Any) -> list[Any]:
    """Return the engines of SQLAlchemy that *function* reads, by themselves or in a sessionmaker."""
    try:
        read = inspect.getclosurevars(inspect.unwrap(function))
    except (TypeError, ValueError):  # It is no function.
        return []
    values = [*read.globals.values(), *read.nonlocals.values()]
    engines = [getattr(each, "kw", {}).get("bind") if hasattr(each, "kw") else each for each in values]
    return [getattr(each, "sync_engine", each) for each in engines if hasattr(each, "dialect")]


def _name(function: Any) -> str:
    return str(getattr(function, "__qualname__", type(function).__name__).rpartition("<locals>.")[2])


def _scope_of(guard: Any) -> Any:
    """Return what names the user for one of FastAPI's dependencies: a function of the request, or a dependency."""
    if guard._asks is not None:  # noqa: SLF001 - it is not told otherwise
        return guard._asks  # noqa: SLF001 - as above
    principal = guard.__signature__.parameters.get("principal")
    for each in getattr(principal.annotation, "__metadata__", ()) if principal is not None else ():
        return getattr(each, "dependency", None)
    return None
