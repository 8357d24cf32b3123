"""The guards of this process, for the current settings, and the steps of a guarded view.

Leases are renewed by one thread for sync and async views, over one connection: an event loop may live for one request
only.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any, cast

from semel.calls import Call
from semel.core.policy import Policy
from semel.django import conf
from semel.errors import ConfigurationError
from semel.guard.ports import AsyncGuard, Guard
from semel.guard.request import Routes
from semel.guard.shutdown import Gate
from semel.guard.steps import AsyncStepPorts, AsyncSteps, StepFlow, ThreadSteps
from semel.guard.unstored import Unstored
from semel.guard.waiting import AsyncWaiters, Waiters
from semel.stores.leases import AsyncLeases, Leases
from semel.stores.unrecorded import Unrecorded
from semel.telemetry.tally import Tally

#: Closed for good when the server is told to stop.
GATE = Gate()
#: What a policy with enforcement="report" has seen in this process: ``TALLY.snapshot()``.
TALLY = Tally()

_lock = threading.Lock()
_guard: Guard | None = None
_async_guard: AsyncGuard | None = None
_routes: tuple[conf.Settings, Routes] | None = None


def guard() -> Guard:
    """Return the guard for code in threads."""
    global _guard  # noqa: PLW0603 - one per process, since its leases are renewed by one thread
    store = conf.store()
    found = _guard
    if found is not None and found.store is store:
        return found
    with _lock:
        if _guard is None or _guard.store is not store:
            if _guard is not None:
                _guard.close()
            leases, room = AsyncLeases(store.perform, store.watch, store.renewals), Waiters(store.listen)
            _guard = Guard(store, leases, GATE, room, Unstored(store.perform, leases, room.hint), TALLY)
        return _guard


def async_guard() -> AsyncGuard:
    """Return the guard for code on event loops."""
    global _async_guard  # noqa: PLW0603 - as above
    threads, store = guard(), conf.async_store()
    found = _async_guard
    if found is None or found.store is not store or found.leases is not threads.leases:
        # Hints from threads reach the loops, too; only one of the two listens to the store.
        leases = cast("AsyncLeases", threads.leases)  # as it was made above
        room = AsyncWaiters(threads.room.overhear)
        found = _async_guard = AsyncGuard(store, leases, GATE, room, threads.unstored, TALLY)
        store.watch(threads.leases.lose_all)
    return found


def routes() -> Routes:
    """Return what the middleware guards."""
    global _routes  # noqa: PLW0603 - read once, since every request asks
    said = conf.settings()
    found = _routes
    if found is None or found[0] is not said:
        found = _routes = said, said.routes
    return found[1]


def checked(policy: Policy) -> Policy:
    """Return *policy* if a Django view can be guarded by it."""
    if policy.store_request or policy.may_accept:
        field = "store_request=True" if policy.store_request else "A policy that accepts requests to be run later"
        raise ConfigurationError(
            f"{field} does not work in Django: an operation is finished without its client through the whole "
            "application. Put semel.wsgi.IdempotencyMiddleware around it in wsgi.py, or semel.asgi's in asgi.py."
        )
    if policy.mode == "atomic" and conf.settings().store is not None:
        raise ConfigurationError(
            'mode="atomic" commits with the ORM, so its records must be in Django\'s own database: remove '
            f'{conf.NAME}["STORE"], and name an alias in {conf.NAME}["DATABASE"].'
        )
    return policy


class DjangoSteps(AsyncSteps):
    """Steps of a view that may run in a thread, on a loop, or first in one and then on the other.

    In the ORM's thread nothing may wait for a loop that waits for that thread: a deadlock.
    """

    def __init__(self, leases: Leases | None = None, *, is_recorded: bool = True) -> None:
        """Check at each step whether it runs in a thread or on a loop. *leases* keep the operation."""
        self._leases = leases
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_recorded = is_recorded

    def take(self, call: Call, flow: StepFlow, /, *args: Any) -> Any:
        """Take one step; on an event loop, return an awaitable."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            store = conf.store()
            recorded_in = store if self._is_recorded else Unrecorded(store)
            return ThreadSteps(recorded_in, self._leases).take(call, flow, *args)
        async_store = conf.async_store()
        ports = AsyncStepPorts(async_store if self._is_recorded else Unrecorded(async_store), call, self._leases)
        return self._take(ports, flow, *args)
