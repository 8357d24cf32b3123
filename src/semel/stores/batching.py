"""Self-clocked batching: what is asked while a batch is under way goes out together in the next one. It knows no SQL.

How much that is, and in which order, ``fair_queue.py`` says.

A batcher that is free sends at once, so a lone request does not wait. There is no timer to linger on (a linger of 1 ms
was measured to cost a lone caller 60 % and to win nothing for a crowd). ``execute`` carries out a batch and answers
with one outcome for each command, in order; an outcome that is an exception is raised to that command's caller alone.
Where commands have *terms* that one statement must share, those of a batch that differ in them go out one after the
other, each with their like.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Collection, Sequence
from copy import copy
from operator import attrgetter, itemgetter
from typing import Any, Generic, TypeVar

from semel.core.commands import Command
from semel.errors import StoreError, StoreRefused, StoreUnavailable
from semel.stores.fair_queue import FairQueue
from semel.stores.step import Step

C = TypeVar("C", bound=Command[Any])
T = TypeVar("T")

#: What commands must have in common to go out together.
Terms = Callable[[Any], object]

_command: Callable[[Any], Any] = itemgetter(0)
_commanded: Callable[[Any], Any] = attrgetter("command")


class AsyncBatcher(Generic[C]):
    """A batcher for the tasks of one event loop."""

    def __init__(
        self,
        execute: Callable[[list[C]], Awaitable[list[Any]]],
        terms: Terms | None = None,
        limit: int | None = None,
    ) -> None:
        """Send batches of at most *limit* through *execute*, those alone together that have the same *terms*."""
        self._execute = execute
        self._terms = terms
        self._queue: FairQueue[tuple[C, Step[Any]]] = FairQueue(limit)
        self._drain: asyncio.Task[None] | None = None

    def submit(self, command: C) -> Step[Any]:
        """Queue *command*. It goes out even if the caller goes away."""
        loop = asyncio.get_running_loop()
        answer: Step[Any] = Step(loop=loop)
        self._queue.append(command, (command, answer))
        if self._drain is None:
            self._drain = loop.create_task(self._run())
        return answer

    async def idle(self) -> None:
        """Wait until everything that was submitted has been carried out."""
        while self._drain is not None:
            await asyncio.wait([self._drain])

    async def _run(self) -> None:
        batch: list[tuple[C, Step[Any]]] = []
        try:
            while batch := self._queue.take():
                for part in (batch,) if len(batch) == 1 else _alike(batch, _command, self._terms):
                    commands = list(map(_command, part))
                    try:
                        outcomes = await self._execute(commands)
                    except Exception as error:  # noqa: BLE001 - each of the callers is told
                        outcomes = await self._without(error, commands)
                    for (_, answer), outcome in zip(part, outcomes, strict=True):
                        answer.settle(outcome)
        except BaseException:
            # Only the end of the loop cancels a batcher. Those who wait for it must not wait for ever.
            for _, answer in (*batch, *self._queue):
                answer.settle(StoreUnavailable("The event loop ended before the store answered.", was_sent=True))
            self._queue.clear()
            raise
        finally:
            self._drain = None

    async def _without(self, error: Exception, commands: list[C]) -> list[Any]:
        """Return the outcomes of a batch that failed. One bad row fails its batch: the others are tried without it."""
        if isinstance(error, StoreError) and not _is_for_size(error, commands):
            return _one_each(error, len(commands))
        if len(commands) == 1:
            return [refused(error)]
        return [await self._alone(command) for command in commands]

    async def _alone(self, command: C) -> Any:
        try:
            return (await self._execute([command]))[0]
        except StoreError as error:
            return error
        except Exception as error:  # noqa: BLE001 - it is this caller's
            return refused(error)


class Batcher(Generic[C]):
    """A batcher for threads. It has no thread of its own: a caller that finds it free sends a batch for all."""

    def __init__(
        self, execute: Callable[[list[C]], list[Any]], terms: Terms | None = None, limit: int | None = None
    ) -> None:
        """Send batches of at most *limit* through *execute*, one at a time, those alone together that have the same
        *terms*.
        """
        self._execute = execute
        self._terms = terms
        self._mutex = threading.Lock()
        self._queue: FairQueue[_Ticket[C]] = FairQueue(limit)
        #: The one that sends the next batch.
        self._leader: _Ticket[C] | None = None

    def submit(self, command: C) -> Any:
        """Carry out *command*, perhaps together with those of other threads, and return its outcome."""
        ticket = _Ticket(command)
        with self._mutex:
            self._queue.append(command, ticket)
            self._leader = self._leader or ticket
            leads = self._leader is ticket
        try:
            if not leads:
                ticket.wait()
            if not ticket.is_done:
                self._lead()
        except BaseException:
            self._leave(ticket)
            raise
        if isinstance(ticket.outcome, Exception):
            raise ticket.outcome
        return ticket.outcome

    def _lead(self) -> None:
        """Carry out the next batch, which its leader is the first of; then let the first of the next one lead."""
        with self._mutex:
            batch = self._queue.take()
        try:
            for part in _alike(batch, _commanded, self._terms):
                outcomes = self._outcomes([ticket.command for ticket in part])
                for ticket, outcome in zip(part, outcomes, strict=True):
                    ticket.settle(outcome)
        finally:
            for ticket in batch:
                if not ticket.is_done:
                    # This thread is killed in the middle.
                    ticket.settle(StoreUnavailable("The thread that asked was interrupted.", was_sent=True))
            with self._mutex:
                self._hand_on()

    def _hand_on(self) -> None:
        self._leader = self._queue.first
        if self._leader is not None:
            self._leader.wake()

    def _leave(self, ticket: _Ticket[C]) -> None:
        """Give up *ticket*, since its thread was interrupted: it can't send the batch of those behind it."""
        with self._mutex:
            self._queue.remove(ticket)
            if self._leader is ticket:
                self._hand_on()

    def _outcomes(self, commands: list[C]) -> list[Any]:
        try:
            return self._execute(commands)
        except Exception as error:  # noqa: BLE001 - one bad row fails its batch; its neighbours are tried without it
            if isinstance(error, StoreError) and not _is_for_size(error, commands):
                return _one_each(error, len(commands))
            if len(commands) == 1:
                return [refused(error)]
            return [outcome for command in commands for outcome in self._outcomes([command])]


class _Ticket(Generic[C]):
    """One thread's place in a batcher."""

    __slots__ = ("_wake", "command", "is_done", "outcome")

    def __init__(self, command: C) -> None:
        self.command = command
        self.outcome: Any = None
        self.is_done = False
        self._wake = threading.Lock()
        self._wake.acquire()

    def wait(self) -> None:
        self._wake.acquire()

    def wake(self) -> None:
        self._wake.release()

    def settle(self, outcome: object) -> None:
        self.outcome = outcome
        self.is_done = True
        self.wake()


def _alike(batch: list[T], command: Callable[[T], Any], terms: Terms | None) -> Collection[list[T]]:
    """Return *batch* in parts of the same *terms*: mostly there is one."""
    if terms is None or len(batch) == 1:
        return (batch,)
    parts: dict[object, list[T]] = {}
    for each in batch:
        parts.setdefault(terms(command(each)), []).append(each)
    return parts.values()


def _is_for_size(error: StoreError, commands: Sequence[object]) -> bool:
    """Whether there was no space for all of them together: for some of them there may be."""
    return len(commands) > 1 and isinstance(error, StoreUnavailable) and error.has_no_space


def refused(error: Exception) -> StoreRefused:
    """Say that a statement was refused, in words that hold nothing of its data: drivers quote the row."""
    told = StoreRefused(f"The database refused a statement ({type(error).__name__}).")
    told.__cause__ = error
    return told


def _one_each(error: StoreError, count: int) -> list[StoreError]:
    # An exception that is raised in several threads gathers all of their tracebacks.
    errors = [copy(error) for _ in range(count)]
    for each in errors:
        each.__cause__ = error.__cause__
    return errors
