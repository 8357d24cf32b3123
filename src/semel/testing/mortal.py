"""A process that dies at one place: what it was doing is dropped there, and nothing that it would do next is done.

Everything that Semel does for a request is asked for by a flow, one command after the other, so these are the places:
before and after each command. What a database does when a client is gone is done here, too: it rolls back.
"""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import timedelta
from typing import Any

from tests.commands import AskOutside, CallInside, CallOutside, NameScope, ReadBody, Tell

from semel import drivers
from semel.core.commands import (
    Begin,
    Claim,
    Command,
    Commit,
    Complete,
    Finish,
    Open,
    Park,
    Release,
    Save,
    TakeOver,
    Undo,
)
from semel.core.handler import RunHandler
from semel.drivers import AsyncPerform, Perform

#: What each command does, for people.
_WORDS: dict[type[Command[Any]], str] = {
    AskOutside: "asking what became of the effect {step}",
    Begin: "beginning the transaction and locking the key",
    CallInside: "calling the function of the phase {step}",
    CallOutside: "calling the effect {step}",
    Claim: "claiming the key",
    Commit: "committing the phase {step}",
    Complete: "storing the answer",
    Finish: "committing the transaction with the answer",
    NameScope: "asking whose request it is",
    Open: "opening the transaction of the phase {step}",
    Park: "parking the operation",
    ReadBody: "reading the body",
    Release: "freeing the key",
    RunHandler: "running the handler",
    Save: "recording the effect {step}",
    TakeOver: "taking the key over",
    Undo: "rolling back",
}
#: Told to people, and to no store: nothing changes by it.
_NO_PLACES = (Tell,)
_OPENS = (Begin, Open)


class Died(BaseException):
    """The process is dead. No handler catches this, and whatever is asked for afterwards raises it again."""


class Process:
    """A process that serves one request, and dies at one place of it."""

    def __init__(self, dies_at: int | None) -> None:
        """Die at that place, counted from 0; None is to live."""
        self._left = dies_at
        #: Where it died, in words; None: it has not.
        self.died_at: str | None = None
        #: The longest lease that it asked for.
        self.lease = timedelta(0)
        #: The flows that have opened a transaction.
        self._opened: list[Flow[Any]] = []

    def note(self, command: Command[Any], flow: Flow[Any]) -> None:
        """Note what *flow* has done."""
        if isinstance(command, _OPENS):
            self._opened.append(flow)

    def has_opened(self, flow: Flow[Any]) -> bool:
        """Whether *flow*, perhaps driven in several parts, has a transaction for the database to roll back."""
        return any(each is flow for each in self._opened)

    def reach(self, when: str, command: Command[Any], flow: Flow[Any]) -> None:
        """Pass a place alive, or die there."""
        if isinstance(command, _NO_PLACES):
            return
        lease = getattr(getattr(command, "claim", command), "lease", None)
        if isinstance(lease, timedelta):
            self.lease = max(self.lease, lease)
        if self.died_at is None and self._left == 0:
            self.died_at = f"{when} {_in_words(command, flow)}"
        if self.died_at is not None:
            raise Died(self.died_at)
        if self._left is not None:
            self._left -= 1


#: Which process this code runs in, where it is one that may die.
_process: ContextVar[Process | None] = ContextVar("semel.testing.process", default=None)
_one_at_a_time = threading.Lock()


@contextmanager
def serving(process: Process) -> Iterator[None]:
    """Have what is done inside the block done by *process*, and by the tasks and threads that it starts."""
    token = _process.set(process)
    try:
        yield
    finally:
        _process.reset(token)


@contextmanager
def mortal() -> Iterator[None]:
    """Let processes die inside the block."""
    if not _one_at_a_time.acquire(blocking=False):
        raise RuntimeError("Another crash_everywhere is under way in this process.")
    here, on_a_loop = drivers._drive_here, drivers._drive  # noqa: SLF001 - the one place where a flow can be stopped

    def drive_here(flow: Flow[Any], command: Command[Any], perform: Perform, until: Any) -> Any:
        process = _process.get()
        if process is None:
            return here(flow, command, perform, until)
        return _drive_here(process, flow, command, perform, until)

    async def drive(flow: Flow[Any], command: Command[Any], perform: AsyncPerform, until: Any) -> Any:
        process = _process.get()
        if process is None:
            return await on_a_loop(flow, command, perform, until)
        return await _drive(process, flow, command, perform, until)

    drivers._drive_here, drivers._drive = drive_here, drive  # noqa: SLF001 - as above
    try:
        with warnings.catch_warnings():
            # What a dead process leaves open, the operating system closes.
            warnings.simplefilter("ignore", ResourceWarning)
            yield
            gc.collect()
    finally:
        drivers._drive_here, drivers._drive = here, on_a_loop  # noqa: SLF001 - as above
        _one_at_a_time.release()


def _drive_here(process: Process, flow: Flow[Any], command: Command[Any], perform: Perform, until: Any) -> Any:
    try:
        while not isinstance(command, until):
            process.reach("before", command, flow)
            try:
                answer = perform(command)
            except Exception as error:  # noqa: BLE001 - it is the flow's to judge
                process.reach("after", command, flow)
                command = flow.throw(error)
            else:
                process.note(command, flow)
                process.reach("after", command, flow)
                command = flow.send(answer)
        process.reach("before", command, flow)
    except Died:
        if process.has_opened(flow):
            with suppress(Exception):
                perform(Undo())
        flow.close()
        raise
    return command


async def _drive(process: Process, flow: Flow[Any], command: Command[Any], perform: AsyncPerform, until: Any) -> Any:
    try:
        while not isinstance(command, until):
            process.reach("before", command, flow)
            try:
                answer = perform(command)
                if hasattr(answer, "__await__"):
                    answer = await answer
            except Exception as error:  # noqa: BLE001 - it is the flow's to judge
                process.reach("after", command, flow)
                command = flow.throw(error)
            else:
                process.note(command, flow)
                process.reach("after", command, flow)
                command = flow.send(answer)
        process.reach("before", command, flow)
    except StopIteration as end:
        return end.value
    except Died:
        if process.has_opened(flow):
            with suppress(Exception):
                await perform(Undo())
        flow.close()
        raise
    return command


def _in_words(command: Command[Any], flow: Flow[Any]) -> str:
    words = _WORDS.get(type(command), type(command).__name__)
    frame = getattr(flow, "gi_frame", None)
    return words.format(step=repr(frame.f_locals.get("name")) if frame is not None else "")
