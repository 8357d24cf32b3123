"""The ports of one delivery: ``ThreadPorts`` in a thread, ``AsyncPorts`` on an event loop. In what order they are
called, ``flows/receive`` says.

A handler is called as the function of a phase is, so these are a phase's ports with the inbox's own statements.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

from semel.calls import Call, InThread
from semel.core.commands import CommitAlone
from semel.core.inbox import Failed, Receipt, Returned, Seen
from semel.errors import ConfigurationError, NoEffect, StoreError
from semel.flows.receive import Delivery
from semel.guard.running import interrupted_by_death, interruptible
from semel.guard.steps import AsyncStepPorts, ThreadStepPorts
from semel.stores import AsyncStore, Store
from semel.stores.inbox import InboxStatements, is_conflict
from semel.stores.statement import Joined
from semel.stores.transaction import AsyncTransaction, Transaction

Function = Callable[..., Any]

_COMMIT = CommitAlone()


class _Statements:
    """What the ports of both colours say to the store."""

    def __init__(self, statements: InboxStatements, delivery: Delivery, max_attempts: int) -> None:
        self._statements = statements
        self._place = delivery.consumer, delivery.message_id
        self._digest = delivery.digest
        self._max_attempts = max_attempts

    def look(self) -> Joined[Seen]:
        return self._statements.look(*self._place)

    def done(self) -> Joined[Receipt | None]:
        return self._statements.note_done(*self._place, self._digest)

    def failure(self, error: str) -> Joined[Receipt | None]:
        return self._statements.note_failure(*self._place, self._digest, error, self._max_attempts)


class ThreadPorts(ThreadStepPorts):
    """What one delivery in a thread may ask for."""

    _transaction: Transaction

    def __init__(
        self, store: Store, call: Call, statements: InboxStatements, delivery: Delivery, max_attempts: int
    ) -> None:
        """Make *call* for *delivery*; park its message after *max_attempts*."""
        super().__init__(store, call)
        self._say = _Statements(statements, delivery, max_attempts)

    async def look(self) -> Seen:
        """Take the lock, and look."""
        with interrupted_by_death():
            return self._transaction.run(self._say.look())

    async def note_done(self) -> Receipt | None:
        """Write the receipt."""
        with interrupted_by_death():
            return self._transaction.run(self._say.done())

    async def note_failure(self, error: str) -> Receipt | None:
        """Count a failed try."""
        with interrupted_by_death():
            return self._transaction.run(self._say.failure(error))

    async def save(self) -> None:
        """Commit."""
        with interrupted_by_death():
            self._transaction.perform(_COMMIT)


class AsyncPorts(AsyncStepPorts):
    """What one delivery on an event loop may ask for."""

    _transaction: AsyncTransaction

    def __init__(
        self, store: AsyncStore, call: Call, statements: InboxStatements, delivery: Delivery, max_attempts: int
    ) -> None:
        """Make *call* for *delivery*; park its message after *max_attempts*."""
        super().__init__(store, call)
        self._say = _Statements(statements, delivery, max_attempts)

    async def look(self) -> Seen:
        """Take the lock, and look."""
        return await interruptible(self._transaction.run(self._say.look()))

    async def note_done(self) -> Receipt | None:
        """Write the receipt."""
        return await interruptible(self._transaction.run(self._say.done()))

    async def note_failure(self, error: str) -> Receipt | None:
        """Count a failed try."""
        return await interruptible(self._transaction.run(self._say.failure(error)))

    async def save(self) -> None:
        """Commit."""
        await interruptible(self._transaction.perform(_COMMIT))


def is_async(function: object) -> bool:
    """Whether *function* has to be awaited."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004 - it is asked what it is, not whether it is


def caught(function: Function) -> Function:
    """Return *function* with its outcome as a value, so that its errors are known from those of the ports."""
    if isinstance(function, InThread):
        return InThread(caught(function.function))
    if is_async(function):

        @wraps(function)
        async def awaited(*args: Any, **kwargs: Any) -> Returned | Failed:
            try:
                return Returned(await function(*args, **kwargs))
            except Exception as error:  # noqa: BLE001 - it is the flow's to judge
                return _failed(error)
            except asyncio.CancelledError as error:
                if _is_cancelled():
                    raise
                # Raised on, it would end a consumer's task that was never cancelled, and no broker would be told.
                other = RuntimeError("What the handler waited for was cancelled.")
                other.__cause__ = error
                return _failed(other)

        return awaited

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Returned | Failed:
        try:
            result = function(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - as above
            return _failed(error)
        _check_begun(result)
        return Returned(result)

    return called


def _check_begun(result: object) -> None:
    """Refuse what has not run: there must be no receipt of it, and no number of tries would help."""
    if inspect.iscoroutine(result):
        result.close()
        raise ConfigurationError("The handler returned a coroutine. Make it `async def`, so that it is awaited.")
    if inspect.isgenerator(result) or inspect.isasyncgen(result):
        raise ConfigurationError("The handler returned a generator, which has not begun. Remove `yield` from it.")


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _failed(error: Exception) -> Failed:
    return Failed(error, counts=not (isinstance(error, NoEffect | StoreError) or is_conflict(error)))
