"""The tiered store for an event loop. What is kept, and for how long, is in ``answers.py``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from semel.core.commands import Claim, Command, Complete, Release, Renew, Save, TakeOver
from semel.core.record import Found, Hold
from semel.stores.base import AsyncStore
from semel.stores.step import Step
from semel.stores.tiered.answers import Answers, UnderWay
from semel.stores.tiered.entry import Entry
from semel.stores.tiered.expiry import now
from semel.stores.tiered.transaction import AsyncTieredTransaction

if TYPE_CHECKING:  # It needs an extra.
    from semel.stores.tiered.async_cache import AsyncCache

T = TypeVar("T")
Performs = dict[type[Command[Any]], Callable[[Any], Step[Any]]]


class AsyncTieredStore(AsyncStore):
    """A durable store, with finished answers kept in front of it."""

    def __init__(self, durable: AsyncStore, *, memory: int, cache: AsyncCache | None = None) -> None:
        """Ask *durable* for all that is not kept in *memory* bytes of this process, or in *cache*."""
        self.durable = durable
        self.cache = cache
        self.answers = Answers(memory)
        self._performs: Performs = {
            Claim: self._claim,
            TakeOver: self._take_over,
            Complete: self._complete,
            Release: self._release,
            Save: self._save,
        }

    @property
    def actor(self) -> str | None:
        """Who the audit trail says did it; None is this process."""
        return self.durable.actor

    @actor.setter
    def actor(self, actor: str | None) -> None:
        self.durable.actor = actor

    @property
    def notes_replays(self) -> bool:  # type: ignore[override]  # it is the durable store's
        """Whether its audit trail is to have a line for every replay, too."""
        return self.durable.notes_replays

    def perform(self, command: Command[T]) -> Step[T]:
        """Start one store command. It is carried out whether or not anybody waits for it."""
        return self._performs.get(type(command), self.durable.perform)(command)

    def renew(self, command: Renew) -> frozenset[Hold]:
        """Prolong leases, from any thread. They are the durable store's alone."""
        return self.durable.renew(command)

    def transaction(self) -> AsyncTieredTransaction:
        """Return a transaction of the durable store's. It is opened only for a key whose answer is not kept."""
        return AsyncTieredTransaction(self.durable.transaction, self._look_up, self.answers, self._share)

    def listen(self, on_end: Callable[[str], None]) -> None:
        """Have the durable store call *on_end*."""
        self.durable.listen(on_end)

    def watch(self, on_loss: Callable[[], None]) -> None:
        """Have the durable store call *on_loss*."""
        self.durable.watch(on_loss)

    def start_in_thread(self, call: Callable[[], Any]) -> asyncio.Future[Any]:
        """Start a plain function where the durable store would."""
        return self.durable.start_in_thread(call)

    async def open(self) -> None:
        """Open the durable store. A cache that can't be reached keeps nobody from serving."""
        await self.durable.open()
        if self.cache is not None:
            await self.cache.open()

    async def close(self) -> None:
        """Let go of every connection."""
        if self.cache is not None:
            await self.cache.close()
        await self.durable.close()

    def forget(self) -> None:
        """Keep nothing in this process, and have nothing on its way to the cache. For tests that move time."""
        self.answers.local.clear()
        self.answers.start_afresh()
        if self.cache is not None:
            self.cache.forget()

    async def _look_up(self, claim: Claim) -> Found | None:
        """Return what is kept of a key, here or in the cache."""
        found = self.answers.local.get(claim.scope, claim.key)
        asked = None if found is not None or self.cache is None else self.cache.get(claim.scope, claim.key)
        if asked is None:
            return found
        entry = await asked
        return None if entry is None else self.answers.keep(entry).found(now())

    def _share(self, entry: Entry | None) -> None:
        if self.cache is not None and entry is not None:
            self.cache.put(entry)

    def _claim(self, claim: Claim) -> Step[Any]:
        found = self.answers.local.get(claim.scope, claim.key)
        if found is not None:
            return _settled(found)
        asked = self.cache.get(claim.scope, claim.key) if self.cache is not None else None
        if asked is None:
            return self._ask(claim)
        step: Step[Any] = Step(loop=asyncio.get_running_loop())
        asked.add_done_callback(partial(self._heard_of_cache, claim, step))
        return step

    def _heard_of_cache(self, claim: Claim, step: Step[Any], asked: asyncio.Future[Entry | None]) -> None:
        # The end of the loop is all that can have ended it otherwise, and then the durable store says so, too.
        entry = None if asked.cancelled() or asked.exception() else asked.result()
        if entry is not None:
            step.settle(self.answers.keep(entry).found(now()))
            return
        try:
            durable = self._ask(claim)
        except Exception as error:  # noqa: BLE001 - it is the waiter's to hear, and not the loop's
            step.settle(error)
            return
        durable.add_done_callback(partial(_pass_on, step))

    def _ask(self, claim: Claim) -> Step[Any]:
        asked_at = now()
        return self._then(self.durable.perform(claim), partial(self._claimed, claim, asked_at))

    def _claimed(self, claim: Claim, asked_at: float, got: Any) -> None:
        if got is not None:
            self._share(self.answers.claimed(claim, got, asked_at))

    def _take_over(self, command: TakeOver) -> Step[Any]:
        asked_at = now()
        step = self.durable.perform(command)
        return self._then(step, lambda got: self.answers.taken_over(command, got, asked_at))

    def _complete(self, command: Complete) -> Step[Any]:
        known = self.answers.ending(command.hold)
        step = self.durable.perform(command)
        return step if known is None else self._then(step, partial(self._completed, command, known))

    def _completed(self, command: Complete, known: UnderWay, got: Any) -> None:
        if got is not None:
            self._share(self.answers.completed(command, known, got))

    def _release(self, command: Release) -> Step[Any]:
        self.answers.ending(command.hold)
        return self.durable.perform(command)

    def _save(self, command: Save) -> Step[Any]:
        step = self.durable.perform(command)
        return self._then(step, lambda got: self.answers.saved(command, got))

    @staticmethod
    def _then(step: Step[Any], note: Callable[[Any], None]) -> Step[Any]:
        """Have *note* hear the outcome before whoever waits for *step*; None: there is none, or nobody waits for it."""
        if step.done():
            # Who waits for it will not wait at all.
            note(_outcome(step))
        else:
            step.add_done_callback(lambda done: note(_outcome(done)))
        return step


def _settled(outcome: Any) -> Step[Any]:
    step: Step[Any] = Step(loop=asyncio.get_running_loop())
    step.settle(outcome)
    return step


def _outcome(done: asyncio.Future[Any]) -> Any:
    return None if done.cancelled() or done.exception() else done.result()


def _pass_on(step: Step[Any], done: asyncio.Future[Any]) -> None:
    if done.cancelled():
        step.abandon()
    else:
        step.settle(done.exception() or done.result())
