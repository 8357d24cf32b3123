"""The tiered store for threads. What is kept, and for how long, is in ``answers.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from semel.core.commands import Claim, Command, Complete, Release, Save, TakeOver, Verdict
from semel.core.record import Found
from semel.stores.base import Store
from semel.stores.tiered.answers import Answers
from semel.stores.tiered.entry import Entry
from semel.stores.tiered.expiry import now
from semel.stores.tiered.transaction import TieredTransaction

if TYPE_CHECKING:  # It needs an extra.
    from semel.stores.tiered.cache import Cache

T = TypeVar("T")


class TieredStore(Store):
    """A durable store, with finished answers kept in front of it."""

    def __init__(self, durable: Store, *, memory: int, cache: Cache | None = None) -> None:
        """Ask *durable* for all that is not kept in *memory* bytes of this process, or in *cache*."""
        self.durable = durable
        self.cache = cache
        self.answers = Answers(memory)
        self._performs: dict[type[Command[Any]], Callable[[Any], Any]] = {
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

    @property
    def is_callers(self) -> bool:  # type: ignore[override]  # as above
        """Whether commands are carried out on a connection that is the calling thread's, and the application's."""
        return self.durable.is_callers

    def perform(self, command: Command[T]) -> T:
        """Carry out one store command."""
        perform = self._performs.get(type(command), self.durable.perform)
        return perform(command)  # type: ignore[no-any-return]  # by the table

    def transaction(self) -> TieredTransaction:
        """Return a transaction of the durable store's. It is opened only for a key whose answer is not kept."""
        return TieredTransaction(self.durable.transaction, self._look_up, self.answers, self._share)

    def listen(self, on_end: Callable[[str], None]) -> None:
        """Have the durable store call *on_end*."""
        self.durable.listen(on_end)

    def watch(self, on_loss: Callable[[], None]) -> None:
        """Have the durable store call *on_loss*."""
        self.durable.watch(on_loss)

    def open(self) -> None:
        """Open the durable store. A cache that can't be reached keeps nobody from serving."""
        self.durable.open()
        if self.cache is not None:
            self.cache.open()

    def migrate(self) -> list[str]:
        """Bring the durable store's schema up to date; return what was applied."""
        return self.durable.migrate()

    def has_neighbours(self) -> bool:
        """Whether the durable store's tables are among those of others."""
        return self.durable.has_neighbours()

    def close(self) -> None:
        """Let go of every connection."""
        if self.cache is not None:
            self.cache.close()
        self.durable.close()

    def forget(self) -> None:
        """Keep nothing in this process, and have nothing on its way to the cache. For tests that move time."""
        self.answers.local.clear()
        self.answers.start_afresh()
        if self.cache is not None:
            self.cache.flush()

    def _look_up(self, claim: Claim) -> Found | None:
        """Return what is kept of a key, here or in the cache."""
        found = self.answers.local.get(claim.scope, claim.key)
        if found is not None or self.cache is None:
            return found
        entry = self.cache.get(claim.scope, claim.key)
        return None if entry is None else self.answers.keep(entry).found(now())

    def _share(self, entry: Entry | None) -> None:
        if self.cache is not None and entry is not None:
            self.cache.put(entry)

    def _claim(self, claim: Claim) -> Any:
        kept = self._look_up(claim)
        if kept is not None:
            return kept
        asked_at = now()
        got = self.durable.perform(claim)
        self._share(self.answers.claimed(claim, got, asked_at))
        return got

    def _take_over(self, command: TakeOver) -> Any:
        asked_at = now()
        got = self.durable.perform(command)
        self.answers.taken_over(command, got, asked_at)
        return got

    def _complete(self, command: Complete) -> Verdict:
        known = self.answers.ending(command.hold)
        verdict = self.durable.perform(command)
        if known is not None:
            self._share(self.answers.completed(command, known, verdict))
        return verdict

    def _release(self, command: Release) -> Verdict:
        self.answers.ending(command.hold)
        return self.durable.perform(command)

    def _save(self, command: Save) -> Verdict:
        verdict = None
        try:
            verdict = self.durable.perform(command)
        finally:
            self.answers.saved(command, verdict)
        return verdict
