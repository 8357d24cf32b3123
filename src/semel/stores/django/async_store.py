"""The store in one of Django's databases, for an event loop: each command runs in the thread in which Django runs the
ORM of this request, so the writes of an async view are in the same transaction.

It belongs to no loop, since a loop may live for one request only. Leases are renewed in a separate thread: that of
a request may be busy with its handler, or in its transaction.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from asgiref.sync import sync_to_async

from semel.core.commands import Begin, Command, Open, Renew
from semel.core.record import Found, Hold
from semel.core.trail import Audit
from semel.errors import StoreUnavailable
from semel.stores.base import AsyncStore
from semel.stores.dialect import Dialect
from semel.stores.django.store import DjangoStore
from semel.stores.django.units import DjangoUnit
from semel.stores.endings import Endings
from semel.stores.forks import start_afresh_in_children
from semel.stores.statement import Joined
from semel.stores.step import Step
from semel.stores.transaction import AsyncConnections, AsyncTransaction, AsyncUnit, Connections

T = TypeVar("T")

#: Tasks under way. A loop has only weak references to its tasks, so they are referenced here.
_tasks: set[asyncio.Task[Any]] = set()


class AsyncDjangoStore(AsyncStore):
    """Records in Django's database *alias*."""

    def __init__(self, alias: str = "default", *, audit: Audit = "on") -> None:
        """Nothing is connected yet."""
        self.alias = alias
        self._store = DjangoStore(alias, audit=audit)
        self.notes_replays = self._store.notes_replays
        self.start_afresh()
        start_afresh_in_children(self)

    def start_afresh(self) -> None:
        """Start without a thread for leases."""
        self._leases = ThreadPoolExecutor(max_workers=1, thread_name_prefix="semel-leases")

    @property
    def ended(self) -> Endings:  # type: ignore[override]  # it belongs to no loop
        """How many requests of this process have ended how: it is added by a thread, since a loop may be short."""
        return self._store.ended

    def perform(self, command: Command[T]) -> Step[T]:
        """Start one store command. It is carried out even if no task waits for it."""
        step: Step[T] = Step(loop=asyncio.get_running_loop())
        _start(self._carry_out(command, step))
        return step

    def renew(self, command: Renew) -> frozenset[Hold]:
        """Renew leases, on Django's connection of the calling thread."""
        self._store.actor = self.actor
        return self._store.perform(command)

    @property
    def dialect(self) -> Dialect:
        """The database, with the usual tables."""
        return self._store.dialect

    def transaction(self) -> AsyncTransaction:
        """Return a transaction for the application; not begun yet. Its ``connection`` is that of the ORM's thread,
        and can be used there only.
        """
        self._store.actor = self.actor
        connections, statements = self._store.parts()
        return AsyncTransaction(AsyncDjangoConnections(connections), statements)

    def start_in_thread(self, call: Callable[[], Any]) -> asyncio.Future[Any]:
        """Start a plain function of the application in the ORM's thread: what it writes is in the transaction."""
        return _start(sync_to_async(call)())

    async def open(self) -> None:
        """Check whether the tables are there, and can be written."""
        await in_the_orms_thread(self._store.open)

    async def ping(self) -> None:
        """As in ``DjangoStore``."""
        await self.open()

    async def close(self) -> None:
        """Stop the thread that renews leases. The connections are Django's."""
        self.ended.close()
        self._leases.shutdown(wait=False)
        self.start_afresh()

    async def _carry_out(self, command: Command[T], step: Step[T]) -> None:
        self._store.actor = self.actor
        call = partial(self._store.perform, command)
        try:
            if isinstance(command, Renew):
                outcome = await asyncio.get_running_loop().run_in_executor(self._leases, call)
            else:
                outcome = await sync_to_async(call)()
        except Exception as error:  # noqa: BLE001 - it is the waiter's
            step.settle(error)
        except BaseException:
            # Only the end of the loop cancels this. A caller must not wait for ever.
            step.settle(StoreUnavailable("The event loop ended before the store answered.", was_sent=True))
            raise
        else:
            step.settle(outcome)


class AsyncDjangoConnections(AsyncConnections):
    """Transactions in the ORM's thread."""

    def __init__(self, connections: Connections) -> None:
        """Take them from *connections*."""
        self._connections = connections

    async def begin(self, command: Begin | Open, opening: Any = None) -> AsyncUnit | Found:
        """Begin a transaction. If this is cancelled in the middle, the transaction is rolled back once it is begun."""
        beginning = _start(sync_to_async(self._connections.begin)(command, opening))
        try:
            begun = await asyncio.shield(beginning)
        except asyncio.CancelledError:
            beginning.add_done_callback(_undo)
            raise
        return begun if isinstance(begun, Found) else AsyncDjangoUnit(begun)

    async def close(self) -> None:
        """Do nothing: the connections are Django's."""


class AsyncDjangoUnit(AsyncUnit):
    """One transaction in the ORM's thread. A cancelled step still runs to its end, and the next waits for it."""

    def __init__(self, unit: DjangoUnit) -> None:
        """Take a transaction that is begun already."""
        self._unit = unit
        self.connection = unit.connection
        self.has_lock, self.is_clear, self.pipelines = unit.has_lock, unit.is_clear, unit.pipelines

    async def run(self, joined: Joined[T]) -> T:
        """Run one statement in the transaction."""
        return await in_the_orms_thread(partial(self._unit.run, joined))

    async def commit_with(self, last: Joined[Any]) -> None:
        """Run the last statement and commit."""
        await in_the_orms_thread(partial(self._unit.commit_with, last))

    async def commit(self) -> None:
        """Commit."""
        await in_the_orms_thread(self._unit.commit)

    async def rollback(self) -> None:
        """Roll back."""
        await in_the_orms_thread(self._unit.rollback)


async def in_the_orms_thread(call: Callable[[], T]) -> T:
    """Call it in the thread in which Django runs the ORM of this request. It goes on even if this is cancelled."""
    return await asyncio.shield(_start(sync_to_async(call)()))


def _start(coroutine: Any) -> asyncio.Task[Any]:
    task = asyncio.get_running_loop().create_task(coroutine)
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)
    return task


def _undo(beginning: asyncio.Task[Any]) -> None:
    if not beginning.cancelled() and not beginning.exception():
        begun = beginning.result()
        if not isinstance(begun, Found):
            _start(sync_to_async(begun.rollback)())
