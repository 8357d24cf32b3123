"""The ports of one guarded call, in both colours: what its flow may ask for, carried out by a store and an application.

``ThreadPorts`` answer at once; ``AsyncPorts`` are awaited on an event loop. An entry point adds what is its own: how a
body is read, and how its handler is run. In what order, ``flows/`` says.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from semel.core.commands import Again, Begin, Claim, Command, Finish, Renew, Save, TakeOver, Undo, Verdict
from semel.core.events import Happening
from semel.core.handler import Ending, Lost, NotStarted, RunHandler, TooManyWaiters, Wait
from semel.core.outcome import Door
from semel.core.policy import Policy
from semel.core.record import Found, Hold
from semel.errors import Interrupted, StoreError
from semel.guard.lookups import AsyncLookups, Lookups, Patience
from semel.guard.running import Running, arun, interrupted_by_death, interruptible, pause, run, settled
from semel.guard.shutdown import Gate
from semel.guard.steps import AsyncSteps, ThreadSteps
from semel.guard.unstored import AsyncUnstored, Unstored
from semel.guard.waiting import AsyncWaiters, Waiter, Waiters
from semel.operation import Operation, Steps, begin, enter
from semel.stores import AsyncStore, Store, greenlets
from semel.stores.leases import AsyncLeases, Leases, OnLost, ignore, is_late
from semel.stores.step import Step
from semel.stores.transaction import AsyncTransaction, Transaction
from semel.stores.unrecorded import Unrecorded
from semel.telemetry.tally import Tally

P = ParamSpec("P")
T = TypeVar("T")
Flow = Coroutine[Any, Any, T]


@dataclass(frozen=True, slots=True)
class Guard:
    """What the guarded calls of one application share, in threads."""

    store: Store
    leases: Leases
    gate: Gate
    #: Where duplicates wait.
    room: Waiters
    #: What the store did not take yet.
    unstored: Unstored
    #: What report mode has seen.
    tally: Tally = field(default_factory=Tally)
    #: Where the state of operations can be asked for; None: nowhere, and none is accepted to be run later.
    status_path: str | None = None
    #: What report mode asks the store.
    lookups: Lookups = field(default_factory=Lookups)

    @classmethod
    def of(cls, store: Store) -> Self:
        """Guard by *store*."""
        leases, room = Leases(store.perform, store.watch, store.renewals), Waiters(store.listen)
        return cls(store, leases, Gate(), room, Unstored(store.perform, leases, room.hint))

    def close(self) -> None:
        """Let what is kept be stored, and renew no more. The store is still open."""
        self.unstored.close()
        self.leases.close()

    def let_go(self, hold: Hold) -> None:
        """Stop renewing: a lease without a worker must expire. Then those who wait for its end may look."""
        self.leases.discard(hold)
        self.room.hint(hold.scope, hold.key)


@dataclass(frozen=True, slots=True)
class AsyncGuard:
    """What the guarded calls of one application share, on event loops."""

    store: AsyncStore
    leases: AsyncLeases
    gate: Gate
    #: Where duplicates wait.
    room: AsyncWaiters
    #: What the store did not take yet.
    unstored: Unstored
    #: What report mode has seen.
    tally: Tally = field(default_factory=Tally)
    #: Where the state of operations can be asked for; None: nowhere, and none is accepted to be run later.
    status_path: str | None = None
    #: What report mode asks the store.
    lookups: AsyncLookups = field(default_factory=AsyncLookups)

    @classmethod
    def of(cls, store: AsyncStore) -> Self:
        """Guard by *store*."""
        leases, room = AsyncLeases(store.renew, store.watch), AsyncWaiters(store.listen)
        return cls(store, leases, Gate(), room, AsyncUnstored(store.perform, leases, room.hint))

    async def close(self) -> None:
        """Let what is kept be stored, and renew no more. The store is still open."""
        await self.unstored.aclose()
        self.leases.close()

    def let_go(self, hold: Hold) -> None:
        """Stop renewing: a lease without a worker must expire. Then those who wait for its end may look."""
        self.leases.discard(hold)
        self.room.hint(hold.scope, hold.key)


#: How often a claim whose answer came late is confirmed. An answer to that may come late, too.
MAX_CONFIRMATIONS = 3


class _Ports(ABC):
    """What does not wait, and is the same in both colours."""

    guard: Any
    #: Of the operation that is run, from then on.
    _hold: Hold | None = None
    _transaction: Any = None
    #: When the claim was asked for, by the process's own clock.
    _asked_at = math.inf
    #: What is left of the time that a store may take where nothing is guarded.
    _patience: Patience | None = None
    #: Among those who wait for another call to end, if it comes to that.
    _waiter: Waiter | None = None

    def __init__(self, guard: Any, policy: Policy | None = None) -> None:
        """Nothing is begun yet. Under a *policy* that only reports, the store must not hold up the answer."""
        if threading.Lock is not greenlets.LOCK:
            greenlets.check()
        self.guard = guard
        #: How the store is asked.
        self._perform: Callable[[Command[Any]], Any] = guard.store.perform
        if policy is not None and policy.enforcement == "report":
            self.ask_as(policy)

    def ask_as(self, policy: Policy) -> None:
        """Wait for the store as long as *policy* lets a request wait: in report mode, not for long."""
        self._perform = self._look_up if policy.enforcement == "report" else self.guard.store.perform

    def _look_up(self, command: Command[Any]) -> Any:
        guard = self.guard
        guard.tally.check_store()
        if getattr(guard.store, "is_callers", False):
            return guard.store.perform(command)
        self._patience = self._patience or Patience()
        return guard.lookups.perform(partial(guard.store.perform, command), self._patience, guard.tally.store_answered)

    @property
    @abstractmethod
    def door(self) -> Door:
        """The entry point, for metrics."""

    def endpoint(self) -> str | None:
        """Return the template of the route, where it is known, for metrics; never what the client sent."""
        return None

    def tell(self, happening: Happening) -> None:
        """Let people know."""
        self.guard.tally.tell(happening)

    def announce(self, scope: str, key: str, found: Found) -> None:
        """Tell the others who wait for a key what was found of it: this call waits no more."""
        self.end_waiting()
        self.guard.room.announce(scope, key, found)

    def end_waiting(self) -> None:
        """Keep no place among those who wait."""
        if self._waiter is not None:
            self.guard.room.end(self._waiter)

    def leave(self) -> None:
        """Say, in any thread, that the client has gone: there is no use in waiting any longer."""
        if self._waiter is not None:
            self._waiter.leave()

    def let_go(self) -> None:
        """Work under no hold any more."""
        hold = self._hold
        if hold is not None:
            self.guard.let_go(hold)

    def keep(self, hold: Hold, commands: tuple[Command[Verdict], ...], lease: timedelta) -> None:
        """Keep what could not be stored, and with it the claim."""
        if self.guard.unstored.add(hold, commands, lease):
            self._hold = None  # It is no longer this call's to let go.

    def saw_outage(self) -> None:
        """Leave workers that live the time to renew their leases, once the store is back."""
        self.guard.leases.saw_outage()

    def is_kept(self, hold: Hold) -> bool:
        """Whether this process works under *hold*, or has its answer, which waits for the store; or another may."""
        guard = self.guard
        return guard.unstored.has(hold) or guard.leases.has(hold) or guard.leases.is_outage_recent()  # type: ignore[no-any-return]  # as of the guard

    def keep_lease(self, hold: Hold, lease: timedelta, on_lost: OnLost = ignore) -> None:
        """Renew the lease of *hold* from now on."""
        self._hold = hold
        self.guard.leases.add(hold, lease, on_lost)

    def _operation(self, run: RunHandler) -> Operation:
        """Return the operation that the application is to work on."""
        if self._waiter is not None:
            self.end_waiting()
        self._hold = run.hold
        transaction = self._transaction
        steps = self._steps(self.guard.store, self.guard.leases) if transaction is None else None
        return Operation(run.hold, run.progress, steps=steps, transaction=transaction, request=run.request)

    def unrecorded(self, hold: Hold) -> Operation:
        """Return the operation of an application while its guard is switched off."""
        return Operation(hold, steps=self._steps(Unrecorded(self.guard.store)), is_recorded=False)

    @abstractmethod
    def _steps(self, store: Any, leases: Leases | None = None) -> Callable[[], Steps]:
        """Return what makes the steps of an operation with its records in *store*, and its lease in *leases*."""


class ThreadPorts(_Ports):
    """The ports of one guarded call in a thread."""

    guard: Guard
    _transaction: Transaction | None = None
    #: Once the handler runs, its lease decides what a thread that is killed has done.
    _has_run = False

    def conduct(self, flow: Callable[Concatenate[Any, P], Flow[T]], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run *flow* to its end, and leave nothing open behind it."""
        try:
            return run(flow, self, *args, **kwargs)
        except BaseException:
            # A thread that is killed in the middle leaves no transaction open.
            if self._transaction is not None:
                self._transaction.perform(Undo())
            raise
        finally:
            self.let_go()

    async def ask(self, command: Command[T]) -> T:
        """Ask the store."""
        try:
            return self._perform(command)  # type: ignore[no-any-return]  # by the command's own type
        except Exception:
            raise
        except BaseException as death:
            if self._has_run:
                raise
            raise Interrupted from death

    async def claim(self, claim: Claim) -> Hold | Found | Again:
        """Claim the key."""
        self._asked_at = time.monotonic()
        return await self.ask(claim)

    async def take_over(self, command: TakeOver) -> Hold | Again:
        """Take the key over."""
        self._asked_at = time.monotonic()
        return await self.ask(command)

    async def begin(self, command: Begin) -> Hold | Found:
        """Open the transaction that the application will write in."""
        with interrupted_by_death():
            self._transaction = self.guard.store.transaction()
            return self._transaction.perform(command)

    async def finish(self, command: Finish) -> Verdict:
        """Commit it, with the record."""
        if self._transaction is None:
            raise AssertionError("A transaction is finished that was begun.")
        with interrupted_by_death():
            return self._transaction.perform(command)

    async def undo(self) -> None:
        """Roll it back, where there is one."""
        if self._transaction is not None:
            self._transaction.perform(Undo())

    async def run_handler(self, run: RunHandler) -> Ending:
        """Let the application do its work, as an operation."""
        if self.guard.gate.is_closed:
            return NotStarted()
        if not self._is_held(run):
            return Lost(has_run=False)
        operation = self._operation(run)
        if run.lease is not None:
            self.keep_lease(run.hold, run.lease, partial(lose, operation))
        self._has_run = True
        with enter(operation):
            return self.handle(operation, run.limit)

    @abstractmethod
    def handle(self, operation: Operation, limit: int) -> Ending:
        """Let the application do its work; keep of its answer at most *limit* bytes in memory."""

    def route_policy(self) -> Policy | None:
        """Return nothing: what is run here has its policy from the beginning."""
        return None

    async def wait(self, wish: Wait) -> Found | Again | TooManyWaiters:
        """Wait for another call to end."""
        self._waiter = self._waiter or Waiter()
        with interrupted_by_death():
            return self.guard.room.wait(wish, self._waiter)

    async def pause(self, duration: timedelta) -> None:
        """Wait."""
        time.sleep(duration.total_seconds())  # noqa: ASYNC251 - there is no loop in this thread

    def _is_held(self, run: RunHandler) -> bool:
        """Whether the handler may be run: a claim that was answered late may be another worker's by now."""
        if run.lease is None or not is_late(self._asked_at, run.lease):
            return True
        with suppress(StoreError):
            for _ in range(MAX_CONFIRMATIONS):
                self._asked_at = time.monotonic()
                if run.hold in self.guard.store.perform(Renew(((run.hold, run.lease),))):
                    break
                # A renewal passes over a record that is being taken over at this moment. A write waits for its end.
                if self.guard.store.perform(Save(run.hold, run.progress, run.progress)) is not Verdict.DONE:
                    break
                if not is_late(self._asked_at, run.lease):
                    return True
        return False

    def _steps(self, store: Any, leases: Leases | None = None) -> Callable[[], Steps]:
        return partial(ThreadSteps, store, leases)


class AsyncPorts(_Ports):
    """The ports of one guarded call on an event loop."""

    guard: AsyncGuard
    _transaction: AsyncTransaction | None = None
    #: Whether a caller that goes away ends the flow where it is. Once the handler runs, nothing does.
    is_interruptible = True

    def conduct(self, flow: Callable[Concatenate[Any, P], Flow[T]], /, *args: P.args, **kwargs: P.kwargs) -> Running[T]:
        """Return what is to be awaited: *flow* to its end. A caller that is cancelled leaves, and it ends behind it."""
        return arun(_to_its_end, self, flow, args, kwargs)

    def ask(self, command: Command[T]) -> Awaitable[T]:
        """Ask the store."""
        return self._perform(command)  # type: ignore[no-any-return]  # by the command's own type

    def claim(self, claim: Claim) -> Awaitable[Hold | Found | Again]:
        """Claim the key."""
        self._asked_at = time.monotonic()
        return self._perform(claim)  # type: ignore[no-any-return]  # as above

    def take_over(self, command: TakeOver) -> Awaitable[Hold | Again]:
        """Take the key over."""
        self._asked_at = time.monotonic()
        return self._perform(command)  # type: ignore[no-any-return]  # as above

    async def begin(self, command: Begin) -> Hold | Found:
        """Open the transaction that the application will write in."""
        self._transaction = self.guard.store.transaction()
        begun = self._transaction.perform(command)
        # Once the handler has run, its answer is waited for: a caller that goes away leaves this to end behind it.
        return await (interruptible(begun) if self.is_interruptible else settled(begun))

    def finish(self, command: Finish) -> Awaitable[Verdict]:
        """Commit it, with the record, even if the caller goes away meanwhile."""
        if self._transaction is None:
            raise AssertionError("A transaction is finished that was begun.")
        return settled(self._transaction.perform(command))

    async def undo(self) -> None:
        """Roll it back, where there is one."""
        if self._transaction is not None:
            undone = self._transaction.perform(Undo())
            await (undone if self.is_interruptible else settled(undone))  # As in ``begin``.

    def _is_doubtful(self, run: RunHandler) -> bool:
        """Whether the handler may have to be left alone: ``refuses`` finds out."""
        lease = run.lease
        return self.guard.gate.is_closed or (lease is not None and is_late(self._asked_at, lease))

    async def refuses(self, run: RunHandler) -> NotStarted | Lost | None:
        """Say why the handler must not be run: this process is about to end, or a claim that was answered late may be
        another worker's by now.
        """
        if self.guard.gate.is_closed:
            return NotStarted()
        if run.lease is None or not is_late(self._asked_at, run.lease):
            return None
        renewal = Renew(((run.hold, run.lease),))
        with suppress(StoreError):
            for _ in range(MAX_CONFIRMATIONS):
                self._asked_at = time.monotonic()
                if run.hold in await interruptible(asyncio.to_thread(self.guard.store.renew, renewal)):
                    break
                # A renewal passes over a record that is being taken over at this moment. A write waits for its end.
                saved = await interruptible(self.guard.store.perform(Save(run.hold, run.progress, run.progress)))
                if saved is not Verdict.DONE:
                    break
                if not is_late(self._asked_at, run.lease):
                    return None
        return Lost(has_run=False)

    def route_policy(self) -> Policy | None:
        """Return nothing: what is run here has its policy from the beginning."""
        return None

    async def wait(self, wish: Wait) -> Found | Again | TooManyWaiters:
        """Wait for another call to end."""
        self._waiter = self._waiter or Waiter()
        return await interruptible(self.guard.room.wait(wish, self._waiter))

    def pause(self, duration: timedelta) -> Awaitable[None]:
        """Wait."""
        return pause(duration)

    def _steps(self, store: Any, leases: Leases | None = None) -> Callable[[], Steps]:
        # Its first step may be taken in a thread, by a handler that is not ``async``.
        return partial(AsyncSteps, store, asyncio.get_running_loop(), leases)


class AsyncCallPorts(AsyncPorts):
    """The ports of one guarded call that ends when its handler returns: of a view, or of a function."""

    async def run_handler(self, run: RunHandler) -> Ending:
        """Let the application do its work, as an operation, in a task of its own."""
        if self._is_doubtful(run) and (refused := await self.refuses(run)) is not None:
            return refused
        self.is_interruptible = False
        operation = self._operation(run)
        loop = asyncio.get_running_loop()
        ending: Step[Ending] = Step(loop=loop)
        task = loop.create_task(self._handle(operation, run, ending))
        _handlers.add(task)
        task.add_done_callback(_handlers.discard)
        if run.lease is not None:
            self.guard.leases.add(run.hold, run.lease, partial(_stop, operation, task))
        return await ending

    @abstractmethod
    async def handle(self, operation: Operation, limit: int) -> Ending:
        """Let the application do its work; keep of its answer at most *limit* bytes in memory."""

    async def _handle(self, operation: Operation, run: RunHandler, ending: Step[Ending]) -> None:
        begin(operation)
        try:
            try:
                ended = await self.handle(operation, run.limit)
            except asyncio.CancelledError:
                if not operation.story.is_lost:
                    raise
                this_task().uncancel()  # It was ``_stop``.
                ended = Lost()
            if operation.loose_ends:
                await operation.tie_up()
        except BaseException:
            # What the handler did is not known, and its lease decides; without one, nothing of it may stay.
            ending.abandon()
            self.let_go()
            if run.lease is None:
                await self.undo()
            raise
        ending.settle(ended)


async def _to_its_end(ports: Any, flow: Callable[..., Flow[T]], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
    try:
        return await flow(ports, *args, **kwargs)
    finally:
        ports.let_go()


#: The handlers of callers that may have gone. A loop holds its tasks weakly, so they are held here.
_handlers: set[asyncio.Task[None]] = set()


def this_task() -> asyncio.Task[Any]:
    """Return the task that this code runs in."""
    task = asyncio.current_task()
    if task is None:  # pragma: no cover - a coroutine on a loop runs in a task
        raise AssertionError
    return task


def lose(operation: Operation) -> None:
    """Say that another worker has the operation. A thread can't be stopped; its next step is refused."""
    operation.story.is_lost = True


def _stop(operation: Operation, task: asyncio.Task[Any]) -> None:
    """Stop the handler, since another worker has the operation."""
    if not operation.story.is_over:
        operation.story.is_lost = True
        task.cancel()
