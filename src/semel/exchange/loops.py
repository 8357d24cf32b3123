"""One guarded call on an event loop."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Self, TypeVar

from semel.core.commands import (
    Announce,
    Begin,
    Command,
    Ending,
    Finish,
    Flow,
    Lost,
    NotStarted,
    Pause,
    RunHandler,
    Tell,
    Undo,
    Wait,
)
from semel.core.record import Hold
from semel.door import Gate
from semel.drivers import aresume, arun
from semel.exchange.threads import Performs
from semel.operation import Operation, begin
from semel.room import AsyncRoom, Visit
from semel.stage import AsyncStage
from semel.stores import AsyncStore
from semel.stores.keeper import AsyncKeeper, Keeper
from semel.stores.transaction import AsyncTransaction
from semel.stores.unrecorded import Unrecorded
from semel.telemetry.tally import Tally

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class AsyncGuard:
    """What the guarded calls of one application share, on event loops."""

    store: AsyncStore
    #: A thread's, where loops come and go with the requests.
    keeper: AsyncKeeper | Keeper
    gate: Gate
    #: Where duplicates wait.
    room: AsyncRoom
    #: What report mode has seen.
    tally: Tally = field(default_factory=Tally)
    #: Where the state of operations can be asked for; None: nowhere, and none is accepted to be run later.
    status_path: str | None = None

    @classmethod
    def of(cls, store: AsyncStore) -> Self:
        """Guard by *store*."""
        return cls(store, AsyncKeeper(store.perform, store.watch), Gate(), AsyncRoom(store.listen))

    def let_go(self, hold: Hold) -> None:
        """Whatever became of it: a lease that is renewed for nobody never runs out, and whoever waits may look."""
        self.keeper.discard(hold)
        self.room.hint(hold.scope, hold.key)


class AsyncHands:
    """Carry out what a flow asks for, on an event loop."""

    #: Whether nothing is guarded, but only watched.
    is_reporting = False

    def __init__(self, guard: AsyncGuard) -> None:
        """Nothing is begun yet."""
        self.guard = guard
        self._transaction: AsyncTransaction | None = None
        #: Among those who wait for another call to end, if it comes to that.
        self._visit = Visit()

    def perform(self, command: Command[Any]) -> Any:
        """Carry out one command, or return what is to be awaited."""
        perform = self.performs.get(type(command))
        if perform is not None:
            return perform(self, command)
        if self.is_reporting:
            self.guard.tally.check_store()
        return self.guard.store.perform(command)

    async def begin(self, command: Begin) -> Any:
        """Open the transaction that the application will write in."""
        self._transaction = self.guard.store.transaction()
        return await self._transaction.perform(command)

    async def end(self, command: Command[Any]) -> Any:
        """End it."""
        if self._transaction is None:  # It could not be opened, and there is none to undo.
            return None
        return await self._transaction.perform(command)

    def operation(self, command: RunHandler) -> Operation:
        """Return the operation that the application is to work on."""
        self.guard.room.end(self._visit)
        stage = None if self._transaction else self.stage()
        return Operation(
            command.hold, command.progress, stage=stage, transaction=self._transaction, request=command.request
        )

    def stage(self) -> AsyncStage:
        """Return where the application takes its steps, where it is in no transaction."""
        return AsyncStage(self.guard.store)

    def unrecorded(self, hold: Hold) -> Operation:
        """Return the operation of an application while its guard is switched off."""
        return Operation(hold, stage=self.unrecorded_stage(), is_recorded=False)

    def unrecorded_stage(self) -> AsyncStage:
        """Return where its steps are taken."""
        return AsyncStage(Unrecorded(self.guard.store))

    async def wait(self, command: Wait) -> Any:
        """Wait for another call to end."""
        return await self.guard.room.wait(command, self._visit)

    def announce(self, command: Announce) -> None:
        """Tell the others who wait for it what was found: this one waits no more."""
        self.guard.room.end(self._visit)
        self.guard.room.announce(command)

    def leave(self) -> None:
        """Say that nobody is there to be answered: there is no use in waiting any longer."""
        self._visit.leave()

    #: How the commands are carried out that are not the store's.
    performs: ClassVar[Performs] = {
        Begin: begin,
        Finish: end,
        Undo: end,
        Wait: wait,
        Announce: announce,
        Pause: lambda _, command: asyncio.sleep(command.duration.total_seconds()),
        Tell: lambda self, command: self.guard.tally.tell(command.happening),
    }


class AsyncExchange(AsyncHands, ABC):
    """One guarded call, on an event loop. The application's part has a task of its own.

    Whoever waits for it may be cancelled when a client hangs up; a handler that is half-way may not.
    """

    @abstractmethod
    async def handle(self, operation: Operation, limit: int) -> Ending:
        """Let the application do its work; keep of its answer at most *limit* bytes in memory."""

    async def conduct(self, flow: Flow[T]) -> T:
        """Run *flow* to its end. A caller that is cancelled leaves at once, and the operation ends behind it."""
        reached: Any = await arun(flow, self.perform, until=RunHandler)
        if not isinstance(reached, RunHandler):
            ended: T = reached
            return ended
        if self.guard.gate.is_closed:
            return await aresume(flow, NotStarted(), self.perform)
        task = asyncio.ensure_future(self._see_through(flow, reached))
        _under_way.add(task)
        task.add_done_callback(_under_way.discard)
        return await asyncio.shield(task)

    async def _see_through(self, flow: Flow[T], command: RunHandler) -> T:
        operation = self.operation(command)
        begin(operation)
        if command.lease is not None:
            self.guard.keeper.add(command.hold, command.lease, partial(_stop, operation, _this_task()))
        try:
            try:
                ending = await self._ending(operation, command.limit)
                if operation.loose_ends:
                    await operation.tie_up()
            except BaseException:
                # What the handler did is not known, and its lease decides; without one, nothing of it may stay.
                if command.lease is None:
                    await self.end(Undo())
                raise
            return await aresume(flow, ending, self.perform)
        finally:
            self.guard.let_go(command.hold)

    async def _ending(self, operation: Operation, limit: int) -> Ending:
        try:
            return await self.handle(operation, limit)
        except asyncio.CancelledError:
            if not operation.story.is_lost:
                raise
            # It was not the caller who cancelled this task, and an answer is still to be given from it.
            _this_task().uncancel()
            return Lost()


#: Calls whose caller may have gone. A loop holds its tasks weakly, so somebody must hold them.
_under_way: set[asyncio.Future[Any]] = set()


def _stop(operation: Operation, task: asyncio.Task[Any]) -> None:
    """Stop the handler, since another worker has the operation. The keeper may be in another thread."""

    def stop() -> None:
        if not operation.story.is_over:
            operation.story.is_lost = True
            task.cancel()

    with suppress(RuntimeError):  # Its loop has ended, and the handler with it. The keeper has others to keep.
        task.get_loop().call_soon_threadsafe(stop)


def _this_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    if task is None:  # pragma: no cover - a coroutine on a loop runs in a task
        raise AssertionError
    return task
