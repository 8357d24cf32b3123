"""One guarded call in a thread."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar, Self, TypeVar

from semel.core.commands import (
    Announce,
    Begin,
    Claim,
    Command,
    Ending,
    Finish,
    Flow,
    Lost,
    NotStarted,
    Pause,
    Renew,
    RunHandler,
    TakeOver,
    Tell,
    Undo,
    Wait,
)
from semel.core.record import Hold
from semel.door import Gate
from semel.drivers import run
from semel.errors import StoreError
from semel.exchange.lookups import Lookups, Patience
from semel.operation import Operation, enter
from semel.room import Room, Visit
from semel.stage import AnyStage, Stage
from semel.stores import Store
from semel.stores.keeper import Keeper, OnLost, ignore, is_late
from semel.stores.transaction import Transaction
from semel.stores.unrecorded import Unrecorded
from semel.telemetry.tally import Tally

T = TypeVar("T")
Performs = dict[type[Command[Any]], Callable[[Any, Any], Any]]

#: What a lease begins with.
CLAIMS = frozenset({Claim, TakeOver})


@dataclass(frozen=True, slots=True)
class Guard:
    """What the guarded calls of one application share."""

    store: Store
    keeper: Keeper
    gate: Gate
    #: Where duplicates wait.
    room: Room
    #: What report mode has seen.
    tally: Tally = field(default_factory=Tally)
    #: Where the state of operations can be asked for; None: nowhere, and none is accepted to be run later.
    status_path: str | None = None
    #: What report mode asks the store.
    lookups: Lookups = field(default_factory=Lookups)

    @classmethod
    def of(cls, store: Store) -> Self:
        """Guard by *store*."""
        return cls(store, Keeper(store.perform, store.watch), Gate(), Room(store.listen))

    def let_go(self, hold: Hold) -> None:
        """Whatever became of it: a lease that is renewed for nobody never runs out, and whoever waits may look."""
        self.keeper.discard(hold)
        self.room.hint(hold.scope, hold.key)


class Hands:
    """Carry out what a flow asks for, in a thread."""

    #: Whether nothing is guarded, but only watched.
    is_reporting = False
    #: When the claim was asked for, by the process's own clock.
    _asked_at = math.inf
    #: What is left of the time that a store may take where nothing is guarded.
    _patience: Patience | None = None

    def __init__(self, guard: Guard) -> None:
        """Nothing is begun yet."""
        self.guard = guard
        self._hold: Hold | None = None
        self._transaction: Transaction | None = None
        #: Among those who wait for another call to end, if it comes to that.
        self._visit = Visit()

    def perform(self, command: Command[Any]) -> Any:
        """Carry out one command."""
        perform = self.performs.get(type(command))
        if perform is not None:
            return perform(self, command)
        if self.is_reporting:
            return self._look_up(command)
        if type(command) in CLAIMS:
            self._asked_at = time.monotonic()
        return self.guard.store.perform(command)

    def _look_up(self, command: Command[Any]) -> Any:
        """Carry out a store's command that must not hold up the answer."""
        guard = self.guard
        guard.tally.check_store()
        if guard.store.is_callers:
            return guard.store.perform(command)
        self._patience = self._patience or Patience()
        return guard.lookups.perform(partial(guard.store.perform, command), self._patience, guard.tally.store_answered)

    def begin(self, command: Begin) -> Any:
        """Open the transaction that the application will write in."""
        self._transaction = self.guard.store.transaction()
        return self._transaction.perform(command)

    def end(self, command: Command[Any]) -> Any:
        """End it."""
        if self._transaction is None:  # It could not be opened, and there is none to undo.
            return None
        return self._transaction.perform(command)

    def take_on(self, command: RunHandler) -> Operation:
        """Return the operation that the application is to work on, whose lease is kept from now on."""
        self.guard.room.end(self._visit)
        stage = None if self._transaction else self.stage()
        operation = Operation(
            command.hold, command.progress, stage=stage, transaction=self._transaction, request=command.request
        )
        self._hold = command.hold
        if command.lease is not None:
            self.keep_lease(command.hold, command.lease, partial(_lose, operation))
        return operation

    def is_held(self, command: RunHandler) -> bool:
        """Whether the handler may be run: a claim that was answered late may be another worker's by now."""
        if command.lease is None or not is_late(self._asked_at, command.lease):
            return True
        try:
            return command.hold not in self.guard.store.perform(Renew(((command.hold, command.lease),)))
        except StoreError:
            return False

    def stage(self) -> AnyStage:
        """Return where the application takes its steps, where it is in no transaction."""
        return Stage(self.guard.store)

    def unrecorded(self, hold: Hold) -> Operation:
        """Return the operation of an application while its guard is switched off."""
        return Operation(hold, stage=self.unrecorded_stage(), is_recorded=False)

    def unrecorded_stage(self) -> AnyStage:
        """Return where its steps are taken."""
        return Stage(Unrecorded(self.guard.store))

    def keep_lease(self, hold: Hold, lease: timedelta, on_lost: OnLost = ignore) -> None:
        """Renew the lease of *hold* from now on."""
        self._hold = hold
        self.guard.keeper.add(hold, lease, on_lost)

    def wait(self, command: Wait) -> Any:
        """Wait for another call to end."""
        return self.guard.room.wait(command, self._visit)

    def announce(self, command: Announce) -> None:
        """Tell the others who wait for it what was found: this one waits no more."""
        self.guard.room.end(self._visit)
        self.guard.room.announce(command)

    def leave(self) -> None:
        """Say, in whatever thread, that nobody is there to be answered: there is no use in waiting any longer."""
        self._visit.leave()

    def let_go(self) -> None:
        """Work under no hold any more."""
        if self._hold is not None:
            self.guard.let_go(self._hold)

    #: How the commands are carried out that are not the store's.
    performs: ClassVar[Performs] = {
        Begin: begin,
        Finish: end,
        Undo: end,
        Wait: wait,
        Announce: announce,
        Pause: lambda _, command: time.sleep(command.duration.total_seconds()),
        Tell: lambda self, command: self.guard.tally.tell(command.happening),
    }


class Exchange(Hands, ABC):
    """One guarded call, in a thread."""

    @abstractmethod
    def handle(self, operation: Operation, limit: int) -> Ending:
        """Let the application do its work; keep of its answer at most *limit* bytes in memory."""

    def conduct(self, flow: Flow[T]) -> T:
        """Run *flow* to its end, and leave nothing open behind it."""
        try:
            return run(flow, self.perform)
        except BaseException:
            # A thread that is killed in the middle leaves no transaction open.
            self.end(Undo())
            raise
        finally:
            self.let_go()

    def run_handler(self, command: RunHandler) -> Ending:
        """Let the application do its work, as an operation."""
        if self.guard.gate.is_closed:
            return NotStarted()
        if not self.is_held(command):
            return Lost()
        operation = self.take_on(command)
        with enter(operation):
            return self.handle(operation, command.limit)

    performs: ClassVar[Performs] = {**Hands.performs, RunHandler: run_handler}


def _lose(operation: Operation) -> None:
    """Say that another worker has the operation. A thread can't be stopped; its next step is refused."""
    operation.story.is_lost = True
