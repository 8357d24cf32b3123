"""Takes the steps of an operation: ``ThreadSteps`` in a thread, ``AsyncSteps`` on an event loop.

It calls the user's functions and lends them a connection. In what order, ``flows/steps`` says.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from types import FunctionType
from typing import Any, TypeVar

from semel.calls import Call, InThread
from semel.core.commands import Command, Commit, Open, Undo, Verdict
from semel.core.events import Happening
from semel.core.handler import Applied, Doubt
from semel.core.record import Hold
from semel.errors import ConfigurationError, Interrupted
from semel.guard.running import Running, Theirs, interrupted_by_death, interruptible, pause, run, seen_by_flow
from semel.outbox import Publishing, publishing
from semel.stores import AsyncStore, Store
from semel.stores.leases import Leases
from semel.stores.transaction import AsyncTransaction, Transaction
from semel.stores.unrecorded import Unrecorded, UnrecordedTransaction
from semel.telemetry.stream import tell

T = TypeVar("T")
Function = Callable[..., Any]
StepFlow = Callable[..., Coroutine[Any, Any, Any]]

_NO_CALL = Call("", lambda: None)
_OPEN = Open()


@contextmanager
def _inside(transaction: Any, name: str) -> Iterator[None]:
    token = publishing.set(Publishing(transaction, name))
    try:
        yield
    finally:
        publishing.reset(token)


def _check_no_phase() -> None:
    if publishing.get() is not None:
        # SQLite has one writer, which would be waiting for itself.
        raise ConfigurationError(
            "progress can't be said inside a phase: its transaction is open. Say it before the phase, or after."
        )


class ThreadSteps:
    """Steps of a handler that runs in a thread."""

    def __init__(self, store: Store | Unrecorded, leases: Leases | None = None) -> None:
        """Keep in *store* what is recorded, and in *leases* the operation; without them, nothing is guarded."""
        self._store = store
        self._leases = leases

    def take(self, call: Call, flow: StepFlow, /, *args: Any) -> Any:
        """Take one step, here and now."""
        return run(flow, ThreadStepPorts(self._store, call, self._leases), *args)

    def note(self, flow: StepFlow, /, *args: Any) -> Any:
        """Run *flow*, which calls no function."""
        _check_no_phase()
        return self.take(_NO_CALL, flow, *args)

    async def stop(self) -> None:
        """Do nothing: a step in a thread ends before its handler does."""


class ThreadStepPorts:
    """What one step in a thread may ask for."""

    _transaction: Transaction | UnrecordedTransaction | None = None

    def __init__(self, store: Store | Unrecorded, call: Call, leases: Leases | None = None) -> None:
        """Make *call*, and keep in *store* what is recorded."""
        self._store = store
        self._leases = leases
        self.call = call

    async def ask(self, command: Command[T]) -> T:
        """Ask the store."""
        with interrupted_by_death():
            return self._store.perform(command)  # type: ignore[return-value]  # an Unrecorded answers DONE

    def tell(self, happening: Happening) -> None:
        """Log it."""
        tell(happening)

    async def open(self) -> None:
        """Open the transaction of the phase."""
        with interrupted_by_death():
            self._transaction = self._store.transaction()
            self._transaction.perform(_OPEN)

    async def commit(self, command: Commit) -> Verdict:
        """Commit the phase."""
        if self._transaction is None:
            raise AssertionError("A phase commits what it has opened.")
        with interrupted_by_death():
            return self._transaction.perform(command)

    async def undo(self) -> None:
        """Roll back, where there is a transaction."""
        if self._transaction is not None:
            self._transaction.perform(Undo())

    async def call_inside(self) -> Any:
        """Call the function of the phase."""
        with interrupted_by_death(), _inside(self._transaction, self.call.name):
            return _here(self.call.inside(self._transaction and self._transaction.connection))

    async def call_outside(self, key: str) -> Any:
        """Call the function of the effect."""
        with interrupted_by_death():
            return _here(self.call.outside(key))

    async def verify(self, key: str) -> Applied | Doubt:
        """Ask what became of the effect."""
        with interrupted_by_death():
            return _verified(_here(self.call.question(key)))

    def is_sure(self, hold: Hold) -> bool:
        """Whether no other worker can have the operation."""
        return self._leases is None or self._leases.is_sure(hold)

    async def renew(self, hold: Hold) -> None:
        """Renew its lease."""
        if self._leases is not None:
            self._leases.confirm(hold)

    async def pause(self, duration: timedelta) -> None:
        """Wait."""
        time.sleep(duration.total_seconds())  # noqa: ASYNC251 - there is no loop in this thread


class AsyncSteps:
    """Steps of a handler that runs on an event loop; or in a thread of an app that does."""

    def __init__(
        self, store: AsyncStore | Unrecorded, loop: asyncio.AbstractEventLoop, leases: Leases | None = None
    ) -> None:
        """Keep in *store* what is recorded, on *loop*, and in *leases* the operation."""
        self._store = store
        self._loop = loop
        self._leases = leases
        self._tasks: set[asyncio.Task[Any]] = set()

    def take(self, call: Call, flow: StepFlow, /, *args: Any) -> Any:
        """Return what is to be awaited; in a thread, wait for it here."""
        taking = self._take(AsyncStepPorts(self._store, call, self._leases), flow, *args)
        try:
            if asyncio.get_running_loop() is self._loop:
                return taking
        except RuntimeError:
            pass  # There is none in this thread.
        return asyncio.run_coroutine_threadsafe(taking, self._loop).result()

    def note(self, flow: StepFlow, /, *args: Any) -> Any:
        """Run *flow*, which calls no function; return what is to be awaited."""
        _check_no_phase()
        return self.take(_NO_CALL, flow, *args)

    async def stop(self) -> None:
        """Cancel the steps under way in other tasks than this one, and wait until they have ended."""
        others = self._tasks - {asyncio.current_task()}
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others)

    async def _take(self, ports: AsyncStepPorts, flow: StepFlow, *args: Any) -> Any:
        task = asyncio.current_task()
        if task is None:  # pragma: no cover - a coroutine on a loop runs in a task
            raise AssertionError
        self._tasks.add(task)
        try:
            return await Running(flow(seen_by_flow(ports), *args), ports)
        finally:
            self._tasks.discard(task)


class AsyncStepPorts:
    """What one step on an event loop may ask for."""

    is_interruptible = True
    _transaction: AsyncTransaction | UnrecordedTransaction | None = None

    def __init__(self, store: AsyncStore | Unrecorded, call: Call, leases: Leases | None = None) -> None:
        """Make *call*, and keep in *store* what is recorded."""
        self._store = store
        self._leases = leases
        self.call = call

    def ask(self, command: Command[T]) -> Awaitable[T]:
        """Ask the store."""
        asked: Any = self._store.perform(command)
        return asked if isinstance(self._store, AsyncStore) else _at_once(asked)

    def tell(self, happening: Happening) -> None:
        """Log it."""
        tell(happening)

    async def open(self) -> None:
        """Open the transaction of the phase."""
        self._transaction = self._store.transaction()
        try:
            await self._transaction.perform(_OPEN)
        except (Exception, GeneratorExit):
            raise
        except BaseException as death:
            raise Interrupted from death

    async def commit(self, command: Commit) -> Verdict:
        """Commit the phase."""
        if self._transaction is None:
            raise AssertionError("A phase commits what it has opened.")
        try:
            return await self._transaction.perform(command)
        except (Exception, GeneratorExit):
            raise
        except BaseException as death:
            raise Interrupted from death

    async def undo(self) -> None:
        """Roll back, where there is a transaction."""
        if self._transaction is not None:
            await self._transaction.perform(Undo())

    async def call_inside(self) -> Any:
        """Call the function of the phase."""
        connection = self._transaction and self._transaction.connection
        call = self.call.inside(connection)
        if isinstance(self.call.function, InThread):
            call = _in_a_thread(call)
        if _is_async(call):
            into = Publishing(self._transaction, self.call.name)
            token = publishing.set(into)
            try:
                result = await Theirs(call())
                into.check()
                return result
            except (Exception, GeneratorExit):
                raise
            except BaseException as death:
                raise Interrupted from death
            finally:
                publishing.reset(token)
        # Unwrapped: the connections of asyncpg's pools have wrappers, which do not say that they are awaited.
        if inspect.iscoroutinefunction(inspect.unwrap(getattr(connection, "execute", _NO_CALL.function))):
            raise ConfigurationError(
                f"{_name(call)} must be `async def`: in this app a phase's connection is "
                f"{type(connection).__module__}.{type(connection).__name__}, which has to be awaited."
            )
        with _inside(self._transaction, self.call.name):
            return await interruptible(self._in_a_thread(call))

    async def call_outside(self, key: str) -> Any:
        """Call the function of the effect."""
        return await self._called(self.call.outside(key))

    async def verify(self, key: str) -> Applied | Doubt:
        """Ask what became of the effect."""
        return _verified(await self._called(self.call.question(key)))

    def is_sure(self, hold: Hold) -> bool:
        """Whether no other worker can have the operation."""
        return self._leases is None or self._leases.is_sure(hold)

    async def renew(self, hold: Hold) -> None:
        """Renew its lease, in a thread, as leases are."""
        if self._leases is not None:
            await interruptible(asyncio.to_thread(self._leases.confirm, hold))

    def pause(self, duration: timedelta) -> Awaitable[None]:
        """Wait."""
        return pause(duration)

    async def _called(self, call: partial[Any]) -> Any:
        call = _in_a_thread(call)
        return await interruptible(Theirs(call()) if _is_async(call) else self._in_a_thread(call))

    async def _in_a_thread(self, call: Function) -> Any:
        running = self._store.start_in_thread(partial(_without_stop_iteration, call))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            # A thread can't be stopped. It must be through with its connection before that is rolled back: what it
            # wrote afterwards would be a transaction of its own.
            while not running.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([running])
            raise


async def _at_once(answer: T) -> T:
    return answer


def _here(call: Function) -> Any:
    if _is_async(call):
        raise ConfigurationError(f"{_name(call)} is `async def`, and this handler is not: it could not be awaited.")
    return call()


def _without_stop_iteration(call: Function) -> Any:
    try:
        return call()
    except StopIteration as error:
        # No future takes it for an outcome, and its waiter would wait for ever.
        raise RuntimeError(f"{_name(call)} raised StopIteration.") from error


def _verified(answer: object) -> Applied | Doubt:
    if isinstance(answer, Applied | Doubt):
        return answer
    raise ConfigurationError(
        f"verify must return semel.Applied(result), semel.NOT_APPLIED or semel.CANT_TELL, not {type(answer).__name__}."
    )


def _in_a_thread(call: partial[Any]) -> partial[Any]:
    """Return the call of the plain function where it was said that it is one: where it runs is for the store to say."""
    function: Any = call.func
    return partial(function.function, *call.args, **call.keywords) if isinstance(function, InThread) else call


def _is_async(call: Function) -> bool:
    function = call.func if isinstance(call, partial) else call
    if isinstance(function, FunctionType) and function.__code__.co_flags & inspect.CO_COROUTINE:
        return True  # As it most often is, and far quicker.
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004 - it is asked what it is, not whether it is


def _name(call: Function) -> str:
    function = call.func if isinstance(call, partial) else call
    return getattr(function, "__qualname__", None) or type(function).__name__
