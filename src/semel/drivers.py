"""Who runs a flow: ``run`` in a thread, ``arun`` on an event loop. The one place where sync and async differ.

A driver knows no command. It is given ``perform``, which carries one out, and it decides what becomes of a flow whose
caller goes away in the middle.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from semel.core.commands import Command, Flow
from semel.errors import Interrupted
from semel.stores.step import Step

T = TypeVar("T")
C = TypeVar("C", bound=Command[Any])
Perform = Callable[[Command[Any]], Any]
AsyncPerform = Callable[[Command[Any]], Any]
#: Of a step whose waiter was cancelled, where there was one.
Outcome = asyncio.Future[Any] | None


def run(flow: Flow[T], perform: Perform) -> T:
    """Run *flow* to its end in this thread."""
    ended: T = run_until(flow, perform, ())
    return ended


def run_until(flow: Flow[T], perform: Perform, until: type[C] | tuple[()]) -> T | C:
    """Run *flow* in this thread to its end, or until it asks for a certain command, which is returned unanswered."""
    try:
        reached: T | C = _drive_here(flow, next(flow), perform, until)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]  # StopIteration is not generic
    return reached


def resume(flow: Flow[T], answer: object, perform: Perform) -> T:
    """Run *flow* on to its end in this thread, with the *answer* to the command at which it was left."""
    try:
        ended: T = _drive_here(flow, flow.send(answer), perform, ())
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]  # as above
    return ended


def _drive_here(flow: Flow[Any], command: Command[Any], perform: Perform, until: Any) -> Any:
    while not isinstance(command, until):
        try:
            answer = perform(command)
        except Exception as error:  # noqa: BLE001 - it is the flow's to judge
            command = flow.throw(error)
        except BaseException:
            if command.interruptible:
                _last_words(flow, perform)
            # A handler that is killed in mid-run has an unknown outcome: its lease decides, not we.
            raise
        else:
            command = flow.send(answer)
    return command


async def arun(flow: Flow[T], perform: AsyncPerform, *, until: type[C] | tuple[()] = ()) -> T | C:
    """Run *flow* on this loop to its end, or until it asks for a certain command, which is returned unanswered.

    ``perform`` answers with a value, a step, or a coroutine. A step is under way without us (a statement in a batch),
    so it is waited for, whoever has gone. A coroutine is ours and is cancelled with us, so it must be one that can be
    begun again. A cancelled caller leaves at once; the flow ends in order behind it.
    """
    try:
        command = next(flow)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]  # StopIteration is not generic
    reached: T | C = await _drive(flow, command, perform, until)
    return reached


async def aresume(flow: Flow[T], answer: object, perform: AsyncPerform) -> T:
    """Run *flow* on to its end, with the *answer* to the command at which it was left."""
    try:
        command = flow.send(answer)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]  # as above
    ended: T = await _drive(flow, command, perform, ())
    return ended


async def _drive(flow: Flow[Any], command: Command[Any], perform: AsyncPerform, until: Any) -> Any:
    try:
        while not isinstance(command, until):
            step = None
            try:
                answer = perform(command)
                if isinstance(answer, Step):
                    step = answer
                    answer = await step
                elif hasattr(answer, "__await__"):
                    answer = await answer
            except asyncio.CancelledError:
                _leave(flow, command, step, perform)
                raise
            except Exception as error:  # noqa: BLE001 - it is the flow's to judge
                command = flow.throw(error)
            except BaseException:
                if command.interruptible:
                    _finish_behind(flow, command, None, perform)
                raise
            else:
                command = flow.send(answer)
    except StopIteration as end:
        return end.value
    return command


def _leave(flow: Flow[Any], command: Command[Any], step: Step[Any] | None, perform: AsyncPerform) -> None:
    """See to the end of a flow whose waiter was cancelled."""
    # A step that was settled in the same turn as its waiter was cancelled has its outcome in itself.
    outcome = step and (step.heir or (None if step.cancelled() else step))
    if step is None or outcome is not None:
        _finish_behind(flow, command, outcome, perform)
    # Else the step was abandoned, as happens when the loop ends: nothing can be done any more.


def _last_words(flow: Flow[Any], perform: Perform) -> None:
    try:
        command = flow.throw(Interrupted())
        while True:
            try:
                answer = perform(command)
            except Exception as error:  # noqa: BLE001 - it is the flow's to judge
                command = flow.throw(error)
            else:
                command = flow.send(answer)
    except (StopIteration, Interrupted):
        return


#: Flows whose callers have gone. A loop holds its tasks weakly, so somebody must hold them.
_behind: set[asyncio.Task[None]] = set()


def _finish_behind(flow: Flow[Any], command: Command[Any], outcome: Outcome, perform: AsyncPerform) -> None:
    task = asyncio.get_running_loop().create_task(_finish(flow, command, outcome, perform))
    _behind.add(task)
    task.add_done_callback(_behind.discard)


async def _finish(flow: Flow[Any], command: Command[Any], outcome: Outcome, perform: AsyncPerform) -> None:
    """Wait for the step that was under way, then end the flow: by its last words, or once a handler runs, as usual."""
    answer: Any
    try:
        if command.interruptible:
            if outcome is not None:
                await asyncio.wait([outcome])
            command = flow.throw(Interrupted())
            outcome = None
        while True:
            try:
                answer = perform(command) if outcome is None else outcome
                outcome = None
                if hasattr(answer, "__await__"):
                    answer = await answer
            except Exception as error:  # noqa: BLE001 - it is the flow's to judge
                command = flow.throw(error)
            else:
                command = flow.send(answer)
    except (StopIteration, Interrupted):
        return
