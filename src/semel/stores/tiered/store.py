"""The tiered store, sync and async: a durable store, with finished answers kept in front of it. What is kept, and for
how long, is in ``memory.py``; the cache in Redis is in ``cache.py``, which is imported only if there is one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from semel import stores
from semel.core.commands import Begin, Claim, Command, Commit, Complete, Erase, Finish, Undo, Verdict
from semel.core.record import Found
from semel.errors import ConfigurationError, NoConnection
from semel.stores.base import AsyncStore, Store
from semel.stores.front import AsyncStoreFront, StoreFront
from semel.stores.step import Step
from semel.stores.tiered.memory import Answers, Entry, deadline, now
from semel.stores.tiered.value import Tiered
from semel.stores.transaction import AsyncTransaction, Transaction

if TYPE_CHECKING:  # They need an extra.
    from semel.stores.tiered.cache import AsyncCache, Cache

T = TypeVar("T")


def opened(tiered: Tiered, url: str | None = None) -> TieredStore:
    """Return the store for threads. It connects on first use."""
    durable = tiered.durable
    if isinstance(durable, AsyncStore):
        raise ConfigurationError(f"{type(durable).__name__} belongs to an event loop. Give the store for threads.")
    store = durable if isinstance(durable, Store) else stores.store(durable, url=url)
    _check(store)
    if tiered.cache is None:
        return TieredStore(store, memory=tiered.memory)
    from semel.stores.tiered.cache import Cache  # noqa: PLC0415 - it needs an extra

    cache = Cache(tiered.cache, tiered.cache_timeout, _namespace(tiered, store))
    return TieredStore(store, memory=tiered.memory, cache=cache)


def async_opened(tiered: Tiered, url: str | None = None) -> AsyncTieredStore:
    """Return the store for an event loop. It connects on first use."""
    durable = tiered.durable
    if isinstance(durable, Store):
        raise ConfigurationError(f"{type(durable).__name__} would block the event loop. Give the async store.")
    store = durable if isinstance(durable, AsyncStore) else stores.async_store(durable, url=url)
    _check(store)
    if tiered.cache is None:
        return AsyncTieredStore(store, memory=tiered.memory)
    from semel.stores.tiered.cache import AsyncCache  # noqa: PLC0415 - it needs an extra

    cache = AsyncCache(tiered.cache, tiered.cache_timeout, _namespace(tiered, store))
    return AsyncTieredStore(store, memory=tiered.memory, cache=cache)


def _check(durable: Store | AsyncStore) -> None:
    if durable.decrypts:
        raise ConfigurationError(
            'The cache would have what its store has decrypted. Write Encrypted(Tiered(...), "env:SEMEL_SECRETS").'
        )


def _namespace(tiered: Tiered, durable: Store | AsyncStore) -> str:
    from semel.stores.tiered.namespace import namespace_of  # noqa: PLC0415 - it knows the addresses of Redis

    return tiered.namespace or namespace_of(durable)


class _Tier:
    """What the sync and the async store share."""

    cache: Any
    answers: Answers

    def forget(self) -> None:
        """Drop all answers in this process, and those that wait for the cache. For tests that move time."""
        self.answers.start_afresh()
        if self.cache is not None:
            self.cache.forget()

    def share(self, entry: Entry | None) -> None:
        """Write an answer to the cache, for other processes."""
        if self.cache is not None and entry is not None:
            self.cache.put(entry)

    def completed(self, command: Complete, known: tuple[bytes, float, str | None], verdict: object) -> None:
        """Keep an answer that the durable store has stored."""
        if verdict is Verdict.DONE:
            self.share(self.answers.ended(command, *known))


class TieredStore(_Tier, StoreFront):  # type: ignore[override]  # what it has of the durable store: properties
    """A tiered store for threads."""

    cache: Cache | None

    def __init__(self, durable: Store, *, memory: int, cache: Cache | None = None) -> None:
        """Ask *durable* for all that is not kept in *memory* bytes of this process, or in *cache*."""
        self.durable = durable
        self.cache = cache
        self.answers = Answers(memory)

    def perform(self, command: Command[T]) -> T:
        """Carry out one store command."""
        if isinstance(command, Claim):
            return self._claim(command)  # type: ignore[no-any-return]  # by the command's own type
        if isinstance(command, Erase):
            return self._erase(command)  # type: ignore[no-any-return]  # as above
        known = self.answers.ending(command)
        outcome: T = self.durable.perform(command)
        if known is not None and isinstance(command, Complete):
            self.completed(command, known, outcome)
        return outcome

    def transaction(self) -> TieredTransaction:
        """Return a transaction of the durable store. It is opened only for a key without a kept answer."""
        return TieredTransaction(self.durable.transaction, self, self.look_up)

    def look_up(self, claim: Claim) -> Found | None:
        """Return what is kept of a key, here or in the cache."""
        found = self.answers.get(claim.scope, claim.key)
        if found is not None or self.cache is None:
            return found
        entry = self.cache.get(claim.scope, claim.key)
        return None if entry is None else self.answers.put(entry).found(now())

    def open(self) -> None:
        """Open the durable store. If the cache can't be reached, the store serves without it."""
        self.durable.open()
        if self.cache is not None:
            self.cache.open()

    def close(self) -> None:
        """Close every connection."""
        if self.cache is not None:
            self.cache.close()
        self.durable.close()

    def _erase(self, command: Erase) -> Any:
        done = self.durable.perform(command)
        if not command.is_preview:
            self.answers.forget(done.ended)
            if self.cache is not None and done.further is None:
                return replace(done, copies=self.cache.erase(command.scope))
        return done

    def _claim(self, claim: Claim) -> Any:
        found = self.look_up(claim)
        if found is not None:
            return found
        asked_at = now()
        got = self.durable.perform(claim)
        self.share(self.answers.claimed(claim, got, asked_at))
        return got


class AsyncTieredStore(_Tier, AsyncStoreFront):  # type: ignore[override]  # as above
    """A tiered store for an event loop."""

    cache: AsyncCache | None

    def __init__(self, durable: AsyncStore, *, memory: int, cache: AsyncCache | None = None) -> None:
        """Ask *durable* for all that is not kept in *memory* bytes of this process, or in *cache*."""
        self.durable = durable
        self.cache = cache
        self.answers = Answers(memory)

    def perform(self, command: Command[T]) -> Step[T]:
        """Start one store command. It is carried out even if no task waits for it."""
        if type(command) is Claim:
            return self._claim(command)
        if type(command) is Erase:
            step_of_erasure: Step[Any] = Step(loop=asyncio.get_running_loop())
            erasing = asyncio.get_running_loop().create_task(self._erase(command))
            erasing.add_done_callback(partial(_pass_on, step_of_erasure))
            return step_of_erasure
        known = self.answers.ending(command)
        step: Step[T] = self.durable.perform(command)
        if known is not None and isinstance(command, Complete):
            _then(step, partial(self.completed, command, known))
        return step

    def transaction(self) -> AsyncTieredTransaction:
        """Return a transaction of the durable store. It is opened only for a key without a kept answer."""
        return AsyncTieredTransaction(self.durable.transaction, self, self.look_up)

    async def look_up(self, claim: Claim) -> Found | None:
        """Return what is kept of a key, here or in the cache."""
        found = self.answers.get(claim.scope, claim.key)
        asked = None if found is not None or self.cache is None else self.cache.get(claim.scope, claim.key)
        if asked is None:
            return found
        entry = await asked
        return None if entry is None else self.answers.put(entry).found(now())

    async def open(self) -> None:
        """Open the durable store. If the cache can't be reached, the store serves without it."""
        await self.durable.open()
        if self.cache is not None:
            await self.cache.open()

    async def close(self) -> None:
        """Close every connection."""
        if self.cache is not None:
            await self.cache.close()
        await self.durable.close()

    async def _erase(self, command: Erase) -> Any:
        done = await self.durable.perform(command)
        if not command.is_preview:
            self.answers.forget(done.ended)
            if self.cache is not None and done.further is None:
                return replace(done, copies=await self.cache.erase(command.scope))
        return done

    def _claim(self, claim: Claim) -> Step[Any]:
        found = self.answers.get(claim.scope, claim.key)
        if found is not None:
            done: Step[Any] = Step(loop=asyncio.get_running_loop())
            done.set_result(found)
            return done
        asked = self.cache.get(claim.scope, claim.key) if self.cache is not None else None
        if asked is None:
            return self._ask(claim)
        step: Step[Any] = Step(loop=asyncio.get_running_loop())
        asked.add_done_callback(partial(self._heard_of_cache, claim, step))
        return step

    def _heard_of_cache(self, claim: Claim, step: Step[Any], asked: asyncio.Future[Entry | None]) -> None:
        # Only the end of the loop can have cancelled it, and then the durable store fails in the same way.
        entry = _outcome(asked)
        if entry is not None:
            step.settle(self.answers.put(entry).found(now()))
            return
        try:
            durable = self._ask(claim)
        except Exception as error:  # noqa: BLE001 - it is the waiter's to hear, and not the loop's
            step.settle(error)
            return
        durable.add_done_callback(partial(_pass_on, step))

    def _ask(self, claim: Claim) -> Step[Any]:
        asked_at = now()
        step: Step[Any] = self.durable.perform(claim)
        _then(step, lambda got: self.share(self.answers.claimed(claim, got, asked_at)))
        return step


def _then(step: Step[Any], note: Callable[[Any], None]) -> None:
    """Call *note* with the outcome before the task that waits for *step* goes on; None: it failed or was cancelled."""
    if step.done():
        note(_outcome(step))
    else:
        step.add_done_callback(lambda done: note(_outcome(done)))


def _outcome(done: asyncio.Future[Any]) -> Any:
    return None if done.cancelled() or done.exception() else done.result()


def _pass_on(step: Step[Any], done: asyncio.Future[Any]) -> None:
    if done.cancelled():
        step.abandon()
    else:
        step.settle(done.exception() or done.result())


class _SharedTransaction:
    """What a sync and an async transaction share, from ``Begin`` or ``Open`` to its end."""

    def __init__(self, make: Callable[[], Any], tier: _Tier, look_up: Callable[[Claim], Any]) -> None:
        """Nothing is begun yet. *make* returns a transaction of the durable store."""
        self._make = make
        self._tier = tier
        self._look_up = look_up
        self._lent: Any = None
        #: When the transaction was requested.
        self._begun_at = 0.0

    @property
    def connection(self) -> Any:
        """The open connection."""
        if self._lent is None:
            raise NoConnection
        return self._lent.connection

    def _needs_none(self, command: Command[Any]) -> bool:
        """Whether there is nothing to do for *command*; make a transaction otherwise."""
        if self._lent is None:
            if isinstance(command, Undo):
                return True
            self._lent = self._make()
        if not isinstance(command, Finish | Commit | Undo):
            self._begun_at = now()
        self._tier.answers.ending(command)
        return False

    def _note(self, command: Command[Any], got: Any) -> None:
        tier = self._tier
        if isinstance(command, Begin) and isinstance(got, Found):
            tier.share(tier.answers.claimed(command.claim, got, self._begun_at))
        # A record that replaced another may have kept its expiry and its fingerprint.
        if isinstance(command, Finish) and got is Verdict.DONE and command.seen is None:
            claim = command.claim
            until = deadline(self._begun_at, claim.retention.total_seconds())
            tier.share(tier.answers.ended(command, claim.fingerprint, until, claim.traceparent))


class TieredTransaction(_SharedTransaction, Transaction):
    """One transaction of threads."""

    def perform(self, command: Command[T]) -> T:
        """Carry out one command."""
        kept: Any = self._look_up(command.claim) if isinstance(command, Begin) else None
        if kept is not None or self._needs_none(command):
            return kept  # type: ignore[no-any-return]  # by the command's own type
        got: T = self._lent.perform(command)
        self._note(command, got)
        return got


class AsyncTieredTransaction(_SharedTransaction, AsyncTransaction):
    """One transaction of an event loop."""

    _look_up: Callable[[Claim], Awaitable[Found | None]]

    async def perform(self, command: Command[T]) -> T:
        """Carry out one command."""
        kept: Any = await self._look_up(command.claim) if isinstance(command, Begin) else None
        if kept is not None or self._needs_none(command):
            return kept  # type: ignore[no-any-return]  # by the command's own type
        got: T = await self._lent.perform(command)
        self._note(command, got)
        return got
