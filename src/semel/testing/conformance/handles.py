"""One interface to sync and async stores, so that every test is written once. It tests nothing by itself."""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import pytest

from semel.core.commands import Command, Renew
from semel.stores.base import AsyncStore, Store
from semel.stores.transaction import AsyncTransaction, Transaction

T = TypeVar("T")

#: Threads that run at once. More would only wait for the interpreter.
CREW = 64


@dataclass(frozen=True, slots=True)
class Candidate:
    """A store under test: how to open another handle on the same data, and how to make that data older."""

    open: Callable[[], Store | AsyncStore]
    #: Moves ``created_at``, ``lease_expires_at``, ``completed_at`` and ``expires_at`` of every record, and ``at`` of
    #: every line of the audit trail, back by this much; or moves the store's clock forward.
    age: Callable[[timedelta], None]
    #: Whether it has transactions for the application. Without them, the tests about them are skipped.
    has_transactions: bool = True


class Handle(ABC):
    """One store object, sync or async."""

    #: The same as in its ``Candidate``.
    has_transactions: bool = True

    @abstractmethod
    def perform(self, command: Command[T]) -> T:
        """Carry out one command."""

    @abstractmethod
    def perform_all(self, commands: Sequence[Command[T]]) -> list[T]:
        """Carry out *commands* at once: in threads, or as tasks."""

    def transaction(self) -> Lent:
        """Return a transaction for the application, not begun yet."""
        if not self.has_transactions:
            pytest.skip("This store has no transactions to share.")
        return self._transaction()

    @abstractmethod
    def _transaction(self) -> Lent:
        """Return it."""

    @abstractmethod
    def act_as(self, actor: str | None) -> None:
        """Set the actor that the audit trail names."""

    @abstractmethod
    def close(self) -> None:
        """Close the store."""


class Lent(ABC):
    """One transaction, sync or async."""

    @abstractmethod
    def perform(self, command: Command[T]) -> T:
        """Carry out one command in it."""


class SyncHandle(Handle):
    """A store for threads."""

    def __init__(self, store: Store) -> None:
        """Ask *store*."""
        self._store = store

    def perform(self, command: Command[T]) -> T:
        """Carry out one command in this thread."""
        return self._store.perform(command)

    def perform_all(self, commands: Sequence[Command[T]]) -> list[T]:
        """Carry out *commands* in as many threads, up to ``CREW``, that start together."""
        return at_once([partial(self._store.perform, command) for command in commands])

    def _transaction(self) -> Lent:
        return _SyncLent(self._store.transaction())

    def act_as(self, actor: str | None) -> None:
        """Set the store's actor."""
        self._store.actor = actor

    def close(self) -> None:
        """Close the store."""
        self._store.close()


class AsyncHandle(Handle):
    """A store for an event loop, and the loop."""

    def __init__(self, store: AsyncStore) -> None:
        """Ask *store* on a loop of its own."""
        self._store = store
        self._runner = asyncio.Runner()

    def perform(self, command: Command[T]) -> T:
        """Carry out one command on the loop; a renewal, as in production, from a thread while the loop does nothing."""
        if isinstance(command, Renew):
            return self._store.renew(command)  # type: ignore[return-value]  # what this command is answered with
        return self.perform_all([command])[0]

    def perform_all(self, commands: Sequence[Command[T]]) -> list[T]:
        """Carry out *commands* together on the loop."""

        async def ask() -> list[T]:
            return await asyncio.gather(*[self._store.perform(command) for command in commands])

        return self._runner.run(ask())

    def _transaction(self) -> Lent:
        async def make() -> AsyncTransaction:
            return self._store.transaction()

        return _AsyncLent(self._runner.run(make()), self._runner)

    def act_as(self, actor: str | None) -> None:
        """Set the store's actor."""
        self._store.actor = actor

    def close(self) -> None:
        """Close the store, then the loop."""
        self._runner.run(self._store.close())
        self._runner.close()


class _SyncLent(Lent):
    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction

    def perform(self, command: Command[T]) -> T:
        return self._transaction.perform(command)


class _AsyncLent(Lent):
    def __init__(self, transaction: AsyncTransaction, runner: asyncio.Runner) -> None:
        self._transaction = transaction
        self._runner = runner

    def perform(self, command: Command[T]) -> T:
        return self._runner.run(self._transaction.perform(command))


def handle(store: Store | AsyncStore, *, has_transactions: bool = True) -> Handle:
    """Return a handle on *store*."""
    made = SyncHandle(store) if isinstance(store, Store) else AsyncHandle(store)
    made.has_transactions = has_transactions
    return made


def race(entries: Sequence[tuple[Handle, Command[Any]]]) -> list[Any]:
    """Let several handles, as several processes would, carry out one command each at the same time."""
    return at_once([partial(each.perform, command) for each, command in entries])


def at_once(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Make the calls in as many threads, up to ``CREW``, that start together."""
    crew = min(len(calls), CREW)
    # A thread is started for each call, since those before it wait here: no call begins before all threads have.
    start = threading.Barrier(crew)
    with ThreadPoolExecutor(crew, initializer=start.wait) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]
