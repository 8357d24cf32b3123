"""Where the steps of an operation are carried out: ``Stage`` in a thread, ``AsyncStage`` on an event loop.

It calls the user's functions and lends them a connection. In what order, ``flows/steps`` says.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import field
from functools import partial
from typing import Any

from semel.calls import InThread
from semel.core.commands import (
    Applied,
    AskOutside,
    CallInside,
    CallOutside,
    Command,
    Commit,
    Doubt,
    Flow,
    Open,
    Pause,
    Tell,
    Undo,
)
from semel.core.value import value
from semel.drivers import arun, run
from semel.errors import ConfigurationError
from semel.stores import AsyncStore, Store
from semel.stores.transaction import AsyncTransaction, Transaction
from semel.stores.unrecorded import Unrecorded, UnrecordedTransaction
from semel.telemetry.logs import log

Function = Callable[..., Any]


@value
class Call:
    """What the handler wants called in one step."""

    function: Function
    arguments: tuple[Any, ...] = ()
    named: dict[str, Any] = field(default_factory=dict)
    #: Says of an effect whether it happened.
    verify: Function | None = None

    def inside(self, connection: object) -> partial[Any]:
        """Return the call of a phase."""
        return partial(self.function, connection, *self.arguments, **self.named)

    def outside(self, key: str) -> partial[Any]:
        """Return the call of an effect."""
        return partial(self.function, *self.arguments, **self.named, idempotency_key=key)

    def question(self, key: str) -> partial[Any]:
        """Return the call that asks about an effect."""
        if self.verify is None:
            raise ConfigurationError('on_unknown="verify" needs verify=, a function that says what happened.')
        return partial(self.verify, *self.arguments, **self.named, idempotency_key=key)


_NO_CALL = Call(lambda: None)

#: Whether this code is a phase's function, or called by one.
_in_phase: ContextVar[bool] = ContextVar("semel.in_phase", default=False)


@contextmanager
def _inside() -> Iterator[None]:
    token = _in_phase.set(True)
    try:
        yield
    finally:
        _in_phase.reset(token)


class AnyStage(ABC):
    """What an operation needs of its stage, in either colour."""

    @abstractmethod
    def take(self, step: Flow[Any], call: Call) -> Any:
        """Take one step; on an event loop, return what is to be awaited."""

    def note(self, flow: Flow[None]) -> Any:
        """Run *flow*, which is no step and calls nobody; on an event loop, return what is to be awaited."""
        if _in_phase.get():
            # SQLite has one writer, which would be waiting for itself.
            raise ConfigurationError(
                "progress can't be said inside a phase, whose transaction is open. Say it before the phase, or after."
            )
        return self.take(flow, _NO_CALL)


class Stage(AnyStage):
    """Steps of a handler that runs in a thread."""

    def __init__(self, store: Store | Unrecorded) -> None:
        """Keep in *store* what is recorded."""
        self._store = store

    def take(self, step: Flow[Any], call: Call) -> Any:
        """Take one step, here and now."""
        return run(step, _Taking(self._store, call).perform)


class _Taking:
    """One step under way in a thread."""

    _transaction: Transaction | UnrecordedTransaction | None = None

    def __init__(self, store: Store | Unrecorded, call: Call) -> None:
        self._store = store
        self._call = call

    def perform(self, command: Command[Any]) -> Any:
        perform = _PERFORM.get(type(command))
        return perform(self, command) if perform else self._store.perform(command)

    def open(self, command: Open) -> None:
        self._transaction = self._store.transaction()
        self._transaction.perform(command)

    def end(self, command: Command[Any]) -> Any:
        if self._transaction is None:  # It could not be opened, and there is none to undo.
            return None
        return self._transaction.perform(command)

    def call_inside(self, _command: CallInside) -> Any:
        with _inside():
            return _here(self._call.inside(self._transaction and self._transaction.connection))

    def call_outside(self, command: CallOutside) -> Any:
        return _here(self._call.outside(command.key))

    def ask_outside(self, command: AskOutside) -> Applied | Doubt:
        return _verified(_here(self._call.question(command.key)))


_PERFORM: dict[type[Command[Any]], Callable[[_Taking, Any], Any]] = {
    Open: _Taking.open,
    Commit: _Taking.end,
    Undo: _Taking.end,
    CallInside: _Taking.call_inside,
    CallOutside: _Taking.call_outside,
    AskOutside: _Taking.ask_outside,
    Pause: lambda _, command: time.sleep(command.duration.total_seconds()),
    Tell: lambda _, command: log(command.happening),
}


class AsyncStage(AnyStage):
    """Steps of a handler that runs on an event loop; or in a thread of an app that does."""

    def __init__(self, store: AsyncStore | Unrecorded) -> None:
        """Keep in *store* what is recorded, on the running loop."""
        self._store = store
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[Any]] = set()

    def take(self, step: Flow[Any], call: Call) -> Any:
        """Return what is to be awaited; in a thread, wait for it here."""
        taking = self._take(step, call)
        if _is_in(self._loop):
            return taking
        return asyncio.run_coroutine_threadsafe(taking, self._loop).result()

    async def stop(self) -> None:
        """Cancel the steps under way in other tasks than this one, and wait until they have ended."""
        others = self._tasks - {asyncio.current_task()}
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others)

    async def _take(self, step: Flow[Any], call: Call) -> Any:
        task = asyncio.current_task()
        if task is None:  # pragma: no cover - a coroutine on a loop runs in a task
            raise AssertionError
        self._tasks.add(task)
        try:
            return await arun(step, _AsyncTaking(self._store, call).perform)
        finally:
            self._tasks.discard(task)


class _AsyncTaking:
    """One step under way on an event loop."""

    _transaction: AsyncTransaction | UnrecordedTransaction | None = None

    def __init__(self, store: AsyncStore | Unrecorded, call: Call) -> None:
        self._store = store
        self._call = call

    def perform(self, command: Command[Any]) -> Any:
        perform = _ASYNC_PERFORM.get(type(command))
        return perform(self, command) if perform else self._store.perform(command)

    async def open(self, command: Open) -> None:
        self._transaction = self._store.transaction()
        await self._transaction.perform(command)

    async def end(self, command: Command[Any]) -> Any:
        if self._transaction is None:  # It could not be opened, and there is none to undo.
            return None
        return await self._transaction.perform(command)

    async def call_inside(self, _command: CallInside) -> Any:
        connection = self._transaction and self._transaction.connection
        call = _in_a_thread(self._call.inside(connection))
        if _is_async(call):
            with _inside():
                return await call()
        if inspect.iscoroutinefunction(getattr(connection, "execute", None)):
            raise ConfigurationError(
                f"{_name(call)} must be `async def`: in this app a phase's connection is "
                f"{type(connection).__module__}.{type(connection).__name__}, which has to be awaited."
            )
        with _inside():
            return await self._in_a_thread(call)

    async def call_outside(self, command: CallOutside) -> Any:
        return await self._anywhere(self._call.outside(command.key))

    async def ask_outside(self, command: AskOutside) -> Applied | Doubt:
        return _verified(await self._anywhere(self._call.question(command.key)))

    async def _anywhere(self, call: partial[Any]) -> Any:
        call = _in_a_thread(call)
        return await (call() if _is_async(call) else self._in_a_thread(call))

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


_ASYNC_PERFORM: dict[type[Command[Any]], Callable[[_AsyncTaking, Any], Any]] = {
    Open: _AsyncTaking.open,
    Commit: _AsyncTaking.end,
    Undo: _AsyncTaking.end,
    CallInside: _AsyncTaking.call_inside,
    CallOutside: _AsyncTaking.call_outside,
    AskOutside: _AsyncTaking.ask_outside,
    Pause: lambda _, command: asyncio.sleep(command.duration.total_seconds()),
    Tell: lambda _, command: log(command.happening),
}


def _here(call: Function) -> Any:
    if _is_async(call):
        raise ConfigurationError(f"{_name(call)} is `async def`, and this handler is not: nobody could await it.")
    return call()


def _without_stop_iteration(call: Function) -> Any:
    try:
        return call()
    except StopIteration as error:
        # No future takes it for an outcome, and whoever waits for that would wait for ever.
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
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004 - it is asked what it is, not whether it is


def _is_in(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False


def _name(call: Function) -> str:
    function = call.func if isinstance(call, partial) else call
    return getattr(function, "__qualname__", None) or type(function).__name__
