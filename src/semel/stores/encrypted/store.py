"""The encrypting store, sync and async: a store, and between it and its callers what encrypts and decrypts."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, TypeVar

from semel.core.commands import Command
from semel.errors import ConfigurationError
from semel.stores.base import AsyncStore, Store
from semel.stores.encrypted.sealing import Place, Sealer, place_of
from semel.stores.front import AsyncStoreFront, StoreFront
from semel.stores.secrets import resolved
from semel.stores.step import Step
from semel.stores.transaction import AsyncTransaction, Transaction

T = TypeVar("T")


class EncryptedStore(StoreFront):
    """An encrypting store for threads."""

    decrypts = True

    def __init__(self, durable: Store, sealer: Sealer) -> None:
        """Ask *durable*, in which nothing is stored that *sealer* has not encrypted."""
        self.durable = durable
        self.sealer = sealer

    def perform(self, command: Command[T]) -> T:
        """Carry out one store command."""
        opened: T = self.sealer.opened(place_of(command), self.durable.perform(self.sealer.sealed(command)))
        return opened

    def transaction(self) -> EncryptedTransaction:
        """Return a transaction of the durable store."""
        return EncryptedTransaction(self.durable.transaction(), self.sealer)


class AsyncEncryptedStore(AsyncStoreFront):
    """An encrypting store for an event loop."""

    decrypts = True

    def __init__(self, durable: AsyncStore, sealer: Sealer) -> None:
        """Ask *durable*, in which nothing is stored that *sealer* has not encrypted."""
        self.durable = durable
        self.sealer = sealer

    def perform(self, command: Command[T]) -> Step[T]:
        """Start one store command. It is carried out even if no task waits for it."""
        asked = self.durable.perform(self.sealer.sealed(command))
        step: Step[Any] = Step(loop=asyncio.get_running_loop())
        asked.add_done_callback(partial(self._pass_on, place_of(command), step))
        return step

    def transaction(self) -> AsyncEncryptedTransaction:
        """Return a transaction of the durable store."""
        return AsyncEncryptedTransaction(self.durable.transaction(), self.sealer)

    def _pass_on(self, place: Place, step: Step[Any], done: asyncio.Future[Any]) -> None:
        if done.cancelled():
            step.abandon()
            return
        outcome: Any = done.exception()
        if outcome is None:
            try:
                outcome = self.sealer.opened(place, done.result())
            except Exception as error:  # noqa: BLE001 - whatever it was, the waiter must hear of it, or it waits for ever
                outcome = error
        step.settle(outcome)


class _Lent:
    """What a sync and an async transaction share: the durable store's own, whatever is asked of it."""

    def __init__(self, lent: Any, sealer: Sealer) -> None:
        """Nothing is begun yet."""
        self._lent = lent
        self._sealer = sealer

    @property
    def connection(self) -> Any:
        """The open connection."""
        return self._lent.connection

    @property
    def dialect(self) -> Any:
        """The database that it is on."""
        return self._lent.dialect

    def run(self, joined: Any) -> Any:
        """Run one more statement in it, while it is open."""
        return self._lent.run(joined)


class EncryptedTransaction(_Lent, Transaction):
    """One transaction of threads."""

    def perform(self, command: Command[T]) -> T:
        """Carry out one command."""
        opened: T = self._sealer.opened(place_of(command), self._lent.perform(self._sealer.sealed(command)))
        return opened


class AsyncEncryptedTransaction(_Lent, AsyncTransaction):
    """One transaction of an event loop."""

    async def perform(self, command: Command[T]) -> T:
        """Carry out one command."""
        got = await self._lent.perform(self._sealer.sealed(command))
        opened: T = self._sealer.opened(place_of(command), got)
        return opened


def opened(durable: Store, place: str) -> EncryptedStore:
    """Return the store for threads, with the secrets at *place*."""
    _check(durable)
    return EncryptedStore(durable, Sealer.of(resolved(place)))


def async_opened(durable: AsyncStore, place: str) -> AsyncEncryptedStore:
    """Return the store for an event loop, with the secrets at *place*."""
    _check(durable)
    return AsyncEncryptedStore(durable, Sealer.of(resolved(place)))


def _check(durable: Store | AsyncStore) -> None:
    if durable.decrypts:
        raise ConfigurationError("This store is encrypted twice. Say once where its secrets are.")
