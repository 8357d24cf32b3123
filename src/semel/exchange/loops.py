"""One guarded call on an event loop."""

from __future__ import annotations

import asyncio
import math
import time
from abc import ABC, abstractmethod
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
    Renew,
    RunHandler,
    Tell,
    Undo,
    Wait,
)
from semel.core.record import Hold
from semel.door import Gate
from semel.drivers import aresume, arun
from semel.errors import StoreError
from semel.exchange.lookups import AsyncLookups, Patience
from semel.exchange.threads import CLAIMS, Performs
from semel.operation import Operation, begin
from semel.room import AsyncRoom, Visit
from semel.stage import AsyncStage
from semel.stores import AsyncStore
from semel.stores.keeper import AsyncKeeper, is_late
from semel.stores.transaction import AsyncTransaction
from semel.stores.unrecorded import Unrecorded
from semel.telemetry.tally import Tally

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class AsyncGuard:
    """What the guarded calls of one application share, on event loops."""

    store: AsyncStore
    keeper: AsyncKeeper
    gate: Gate
    #: Where duplicates wait.
    room: AsyncRoom
    #: What report mode has seen.
    tally: Tally = field(default_factory=Tally)
    #: Where the state of operations can be asked for; None: nowhere, and none is accepted to be run later.
    status_path: str | None = None
    #: What report mode asks the store.
    lookups: AsyncLookups = field(default_factory=AsyncLookups)

    @classmethod
    def of(cls, store: AsyncStore) -> Self:
        """Guard by *store*."""
        return cls(store, AsyncKeeper(store.renew, store.watch), Gate(), AsyncRoom(store.listen))

    def let_go(self, hold: Hold) -> None:
        """Whatever became of it: a lease that is renewed for nobody never runs out, and whoever waits may look."""
        self.keeper.discard(hold)
        self.room.hint(hold.scope, hold.key)


class AsyncHands:
    """Carry out what a flow asks for, on an event loop."""

    #: Whether nothing is guarded, but only watched.
    is_reporting = False
    #: When the claim was asked for, by the process's own clock.
    _asked_at = math.inf
    #: What is left of the time that a store may take where nothing is guarded.
    _patience: Patience | None = None

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
            return self._look_up(command)
        if type(command) in CLAIMS:
            self._asked_at = time.monotonic()
        return self.guard.store.perform(command)

    def _look_up(self, command: Command[Any]) -> Any:
        """Start a store's command that must not hold up the answer."""
        guard = self.guard
        guard.tally.check_store()
        self._patience = self._patience or Patience()
        return guard.lookups.perform(partial(guard.store.perform, command), self._patience, guard.tally.store_answered)

    async def begin(self, command: Begin) -> Any:
        """Open the transaction that the application will write in."""
        self._transaction = self.guard.store.transaction()
        return await self._transaction.perform(command)

    async def end(self, command: Command[Any]) -> Any:
        """End it."""
        if self._transaction is None:  # It could not be opened, and there is none to undo.
            return None
        return await self._transaction.perform(command)

    async def reach(self, flow: Flow[T]) -> T | RunHandler:
        """Run *flow* until its handler is to be run, or to its end where it must not be."""
        reached = await arun(flow, self.perform, until=RunHandler)
        if not isinstance(reached, RunHandler):
            return reached
        if self.guard.gate.is_closed:
            return await aresume(flow, NotStarted(), self.perform)
        if not await self.is_held(reached):
            return await aresume(flow, Lost(), self.perform)
        return reached

    async def is_held(self, command: RunHandler) -> bool:
        """Whether the handler may be run: a claim that was answered late may be another worker's by now."""
        if command.lease is None or not is_late(self._asked_at, command.lease):
            return True
        renewal = Renew(((command.hold, command.lease),))
        try:
            return command.hold not in await asyncio.to_thread(self.guard.store.renew, renewal)
        except StoreError:
            return False

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
        reached = await self.reach(flow)
        if not isinstance(reached, RunHandler):
            return reached
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
    """Stop the handler, since another worker has the operation."""
    if not operation.story.is_over:
        operation.story.is_lost = True
        task.cancel()


def _this_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    if task is None:  # pragma: no cover - a coroutine on a loop runs in a task
        raise AssertionError
    return task
