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

T = TypeVar("T")
Perform = Callable[[Command[Any]], Any]
AsyncPerform = Callable[[Command[Any]], Any]
Step = asyncio.Future[Any] | None


def run(flow: Flow[T], perform: Perform) -> T:
    """Run *flow* to its end in this thread."""
    try:
        command = next(flow)
        while True:
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
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]  # StopIteration is not generic


async def arun(flow: Flow[T], perform: AsyncPerform) -> T:
    """Run *flow* to its end on this loop. A cancelled caller leaves at once; the flow ends in order behind it.

    ``perform`` answers with a value, a coroutine, or a future. A coroutine is ours and is cancelled with us, so it must
    be one that can be begun again. A future is under way without us (a statement in a batch, a handler), so it is
    waited for, whoever has gone.
    """
    try:
        command = next(flow)
        while True:
            step = None
            try:
                answer = perform(command)
                if asyncio.isfuture(answer):
                    step = answer
                    answer = await asyncio.shield(step)
                elif asyncio.iscoroutine(answer):
                    answer = await answer
            except asyncio.CancelledError:
                if step is None or not step.cancelled():
                    _finish_behind(flow, command, step, perform)
                # Else the step itself was cancelled, as happens when the loop ends: nothing can be done any more.
                raise
            except Exception as error:  # noqa: BLE001 - it is the flow's to judge
                command = flow.throw(error)
            else:
                command = flow.send(answer)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]  # StopIteration is not generic


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


def _finish_behind(flow: Flow[Any], command: Command[Any], step: Step, perform: AsyncPerform) -> None:
    task = asyncio.get_running_loop().create_task(_finish(flow, command, step, perform))
    _behind.add(task)
    task.add_done_callback(_behind.discard)


async def _finish(flow: Flow[Any], command: Command[Any], step: Step, perform: AsyncPerform) -> None:
    """Wait for the step that was under way, then end the flow: by its last words, or once a handler runs, as usual."""
    answer: Any
    try:
        if command.interruptible:
            if step is not None:
                await asyncio.wait([step])
            command = flow.throw(Interrupted())
            step = None
        while True:
            try:
                answer = perform(command) if step is None else step
                step = None
                if asyncio.isfuture(answer) or asyncio.iscoroutine(answer):
                    answer = await answer
            except Exception as error:  # noqa: BLE001 - it is the flow's to judge
                command = flow.throw(error)
            else:
                command = flow.send(answer)
    except (StopIteration, Interrupted):
        return
