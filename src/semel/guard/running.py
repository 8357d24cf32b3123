"""Runs a flow: ``run`` in a thread, ``arun`` on an event loop. It knows no port.

In a thread every port answers at once, so one ``send(None)`` brings a flow to its end. On a loop a flow runs in its
caller's own task, natively. What it waits for there is a ``Step``, which is under way without it (a statement in a
batch, a handler in its own task), or a coroutine of a port, which is cancelled with the caller. A caller that is
cancelled leaves at once; the flow ends in order behind it, in a task that is not cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from semel.errors import Interrupted
from semel.stores.step import Step

P = ParamSpec("P")
T = TypeVar("T")
X = TypeVar("X")
Flow = Coroutine[Any, Any, T]

_HAS_WAITED = "A port for threads has waited, and there is no loop to wake the flow."

#: Put in front of the ports of every flow of this process, where a test wants to stop flows in the middle.
in_front: Callable[[Any], Any] | None = None


def seen_by_flow(ports: X) -> X:
    """Return *ports* as a flow is to have them."""
    return ports if in_front is None else in_front(ports)


def run(flow: Callable[Concatenate[X, P], Flow[T]], ports: X, /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Run *flow* over *ports* to its end, in this thread."""
    running = flow(seen_by_flow(ports), *args, **kwargs)
    try:
        running.send(None)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]  # StopIteration is not generic
    except Interrupted as interrupted:
        _raise_cause(interrupted)
        raise
    running.close()
    raise AssertionError(_HAS_WAITED)


class Handover:
    """Awaited by a port where the handler is run elsewhere: the flow is left there, until it is resumed."""

    def __await__(self) -> Generator[Handover, Any, Any]:
        """Leave the flow, and return what it is resumed with."""
        return (yield self)


class Split(Generic[T]):
    """A flow in a thread, in two parts: up to its handler, which a framework calls by itself, and the rest."""

    def __init__(
        self, flow: Callable[Concatenate[X, P], Flow[T]], ports: X, /, *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Nothing of *flow* has run yet."""
        # Not called yet: a request may be cancelled before it is started, and a coroutine wants to be awaited.
        self._make = partial(flow, seen_by_flow(ports), *args, **kwargs)
        #: Whether the flow waits for its handler's ending.
        self.is_left = False

    def start(self) -> T | None:
        """Run the flow up to its handler, or to its end where it must not run."""
        self._flow = self._make()
        return self._send(None)

    def resume(self, answer: object) -> T | None:
        """Run the rest of the flow, with the *answer* to what it waits for."""
        return self._send(answer)

    def _send(self, answer: object) -> T | None:
        self.is_left = False
        try:
            left = self._flow.send(answer)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]  # as above
        except Interrupted as interrupted:
            _raise_cause(interrupted)
            raise
        if not isinstance(left, Handover):
            self._flow.close()
            raise AssertionError(_HAS_WAITED)  # noqa: TRY004 - it is a mistake in a port
        self.is_left = True
        return None


def arun(flow: Callable[Concatenate[X, P], Flow[T]], ports: X, /, *args: P.args, **kwargs: P.kwargs) -> Running[T]:
    """Return what is to be awaited: *flow* over *ports*, on the running loop.

    Where ``ports.is_interruptible`` is true, the flow is interrupted when the caller is cancelled; otherwise the
    flow goes on as if nothing had happened.
    """
    return Running(flow(seen_by_flow(ports), *args, **kwargs), ports)


class Running(Generic[T]):
    """A flow on an event loop."""

    __slots__ = ("_flow", "_is_behind", "_left_at", "_ports", "_thrown", "leaves_at")

    def __init__(self, flow: Flow[T], ports: Any) -> None:
        """Nothing of *flow* has run yet."""
        self._flow = flow
        self._ports = ports
        #: What the flow is resumed with, if not with an answer.
        self._thrown: BaseException | None = None
        #: Whether the caller has gone, and a task of our own runs the rest.
        self._is_behind = False
        #: A step at which the flow is left to be awaited once more, for its rest.
        self.leaves_at: Step[Any] | None = None
        self._left_at: Step[Any] | None = None

    @property
    def is_left(self) -> bool:
        """Whether the flow waits for the step that it was to be left at."""
        return self._left_at is not None

    async def rest(self) -> T:
        """Run the rest of a flow that was left, as a coroutine that a task can be made of."""
        return await self

    def __await__(self) -> Generator[Any, None, T]:  # noqa: C901, PLR0912 - every way out of one await, in one place
        """Run the flow in the task that awaits it."""
        flow, thrown, cancelled = self._flow, self._thrown, None
        waited, self._left_at = self._left_at, None
        is_own = waited is not None
        while True:
            if waited is None:
                try:
                    waited = flow.send(None) if thrown is None else flow.throw(thrown)
                except StopIteration as end:
                    return end.value  # type: ignore[no-any-return]  # StopIteration is not generic
                except Interrupted as interrupted:
                    _raise_cause(interrupted)
                    if cancelled is not None:
                        raise cancelled from None
                    raise
                # Now, and not later: what is the flow's own may be the application's to a flow around this one.
                is_own = isinstance(waited, Step) and not waited.is_theirs
                if cancelled is not None and not _is_cancelled():
                    cancelled = None  # A cancel scope or a time limit inside of a port was meant, and has ended.
                if cancelled is not None and is_own:
                    self._leave(waited)
                    raise cancelled
                if waited is self.leaves_at and waited is not None:
                    self._left_at, self.leaves_at = waited, None
                    return None  # type: ignore[return-value]  # it has not ended: ``is_left``
            thrown = None
            try:
                if not (isinstance(waited, Step) and waited.done()):
                    yield waited
                waited = None
            except asyncio.CancelledError as error:
                if self._is_behind:
                    raise  # The loop is about to end.
                if is_own and isinstance(waited, Step):
                    self._leave(waited)
                    raise
                thrown, cancelled, waited = error, error, None
            except Exception as error:  # noqa: BLE001 - what a future ended with is raised where the flow waits for it
                thrown, waited = error, None

    def _leave(self, step: Step[Any]) -> None:
        """See to the end of the flow, which waits for *step*, in a task of its own."""
        # A step that was settled in the same turn as its waiter was cancelled has its outcome in itself.
        outcome = step.heir or (None if step.cancelled() else step)
        if outcome is None:
            return  # It was abandoned, as happens when the loop ends: nothing can be done any more.
        self._is_behind = True
        task = asyncio.get_running_loop().create_task(self._go_on(outcome))
        _behind.add(task)
        task.add_done_callback(_behind.discard)

    async def _go_on(self, outcome: asyncio.Future[Any]) -> None:
        if not outcome.done():
            await asyncio.wait([outcome])
        if outcome.cancelled():
            return  # As above.
        if self._ports.is_interruptible:
            outcome.exception()  # Seen: the flow is told something else.
            self._thrown = Interrupted()
        try:
            await self
        except Interrupted:
            return


#: The flows of callers that have gone. A loop holds its tasks weakly, so they are held here.
_behind: set[asyncio.Task[None]] = set()


async def callers_gone() -> None:
    """Wait for the flows on this loop that have lost their callers."""
    loop = asyncio.get_running_loop()
    while behind := [task for task in _behind if task.get_loop() is loop]:
        await asyncio.wait(behind)


def _raise_cause(interrupted: Interrupted) -> None:
    """Raise what has interrupted the flow, if that was not the client: a thread that is killed is killed."""
    cause = interrupted.__cause__
    if cause is not None:
        interrupted.__cause__ = interrupted.__context__ = None  # Two that name each other can't be printed.
        raise cause from None


@contextmanager
def interrupted_by_death() -> Iterator[None]:
    """Interrupt the flow when its thread is killed (``KeyboardInterrupt``, a worker's time limit)."""
    try:
        yield
    except Exception:
        raise
    except BaseException as death:
        raise Interrupted from death


async def interruptible(running: Awaitable[T]) -> T:
    """Wait for what is cancelled with the caller, or killed with its task; the flow is interrupted then."""
    try:
        return await running
    except (Exception, GeneratorExit):
        raise
    except BaseException as death:
        raise Interrupted from death


class Theirs(Generic[T]):
    """Code of the application's, awaited in a flow: the steps that it waits for are none of the flow's.

    It may be another guard with its handler. A flow that was left at such a step would have that guard interrupted
    in place of itself.
    """

    __slots__ = ("_running",)

    def __init__(self, running: Awaitable[T]) -> None:
        """Nothing of *running* has run yet."""
        self._running = running

    def __await__(self) -> Generator[Any, None, T]:
        """Wait for it, as ``await`` does."""
        running = _awaited(self._running)
        thrown: BaseException | None = None
        while True:
            try:
                waited = running.send(None) if thrown is None else running.throw(thrown)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]  # StopIteration is not generic
            thrown = None
            if isinstance(waited, Step):
                waited.is_theirs = True
            try:
                yield waited
            except GeneratorExit:
                running.close()
                raise
            except BaseException as error:  # noqa: BLE001 - it is raised where it is waited for
                thrown = error


async def _awaited(running: Awaitable[T]) -> T:
    return await running


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def settled(work: Coroutine[Any, Any, T]) -> Step[T]:
    """Start *work* in a task of its own, which ends even if its waiter is cancelled."""
    loop = asyncio.get_running_loop()
    step: Step[T] = Step(loop=loop)
    task = loop.create_task(work)
    _working.add(task)

    def end(done: asyncio.Task[T]) -> None:
        _working.discard(done)
        if done.cancelled():
            step.abandon()
        else:
            step.settle(done.exception() or done.result())  # type: ignore[arg-type]  # an Exception, or its result

    task.add_done_callback(end)
    return step


#: Held for the same reason as the flows.
_working: set[asyncio.Task[Any]] = set()


def pause(duration: timedelta) -> Step[None]:
    """Wait for *duration*, whether or not the waiter is cancelled meanwhile."""
    loop = asyncio.get_running_loop()
    step: Step[None] = Step(loop=loop)
    loop.call_later(duration.total_seconds(), step.settle, None)
    return step
