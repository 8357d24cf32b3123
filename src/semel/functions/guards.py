"""The guards of functions, opened at the first call: one store for each URL, however many functions name it. What is
opened here is closed here; a store that was passed in is not.
"""

from __future__ import annotations

import asyncio
import atexit
import os
from collections.abc import AsyncGenerator, Hashable
from typing import Any

from semel.errors import ConfigurationError
from semel.guard.ports import AsyncGuard, Guard
from semel.stores import AsyncStore, Store, async_store, store
from semel.stores.tiered import Tiered

VARIABLE = "SEMEL_STORE"

_Loop = asyncio.AbstractEventLoop

# Written to by ``setdefault``, which is atomic: if two threads are first, one guard is used, and the other one
# has opened nothing. There is no lock, since a child that is forked while it is held could never acquire it.

#: By what was given.
_guards: dict[Any, Guard] = {}
_async_guards: dict[Any, AsyncGuard] = {}
#: By loop and URL, since connections belong to their loop; and what closes each with it.
_on_loops: dict[tuple[_Loop, str | Tiered], tuple[AsyncGuard, AsyncGenerator[None, None]]] = {}


def guard_at(given: Any) -> Guard:
    """Return the guard of plain functions on the store that was *given*."""
    given = _named(given)
    return _guards.get(given) or _guards.setdefault(given, _guard(given))


async def async_guard_at(given: Any) -> AsyncGuard:
    """Return the guard of async functions on the running loop and the store that was *given*."""
    given = _named(given)
    durable = given.durable if isinstance(given, Tiered) else given
    if not isinstance(durable, str) or durable.startswith("memory:"):
        # The application's own store, which it uses on its own loop; or one that belongs to no loop.
        return _async_guards.get(given) or _async_guards.setdefault(given, _async_guard(given))
    place = asyncio.get_running_loop(), given
    if place not in _on_loops:
        _forget_closed_loops()
        guard = _async_guard(given)
        ending = _close_at_the_end(place, guard)
        _on_loops[place] = guard, ending
        await anext(ending)
    return _on_loops[place][0]


def close() -> None:
    """Close the stores that plain functions have opened. Calling one again opens its store again.

    The end of the process does this too, and the end of an event loop does it for async functions.
    """
    _async_guards.clear()
    while _guards:
        given, guard = _guards.popitem()
        guard.close()
        if guard.store is not given:
            guard.store.close()


atexit.register(close)


def _guard(given: Any) -> Guard:
    return Guard.of(given if isinstance(given, Store) else store(given))


def _async_guard(given: Any) -> AsyncGuard:
    return AsyncGuard.of(given if isinstance(given, AsyncStore) else async_store(given))


def _named(given: Any) -> Any:
    """Return what was *given*, or else the URL in the environment."""
    found = os.environ.get(VARIABLE) if given is None else given
    if found is None or found == "":
        raise ConfigurationError(f"Which store? Give store=, such as store='sqlite:///semel.db', or set {VARIABLE}.")
    if not isinstance(found, Hashable):
        raise ConfigurationError(f"store must be a URL, a store, an engine or a pool, not {type(found).__name__}.")
    return found


async def _close_at_the_end(place: tuple[_Loop, str | Tiered], guard: AsyncGuard) -> AsyncGenerator[None, None]:
    # At its end ``asyncio.run`` closes the async generators of its loop.
    try:
        yield
    finally:
        _on_loops.pop(place, None)
        await guard.close()
        await guard.store.close()


def _forget_closed_loops() -> None:
    for place in [each for each in tuple(_on_loops) if each[0].is_closed()]:
        _on_loops.pop(place, None)
