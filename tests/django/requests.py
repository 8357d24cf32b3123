"""A store as requests use it: each in a thread of its own, and in an async app in a context of its own."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from asgiref.sync import SyncToAsync, ThreadSensitiveContext

from semel.core.commands import Command, Renew, Undo
from semel.core.record import Hold
from semel.stores.base import AsyncStore, Store
from semel.stores.django import AsyncDjangoStore, DjangoStore
from semel.stores.step import Step
from semel.stores.transaction import AsyncTransaction, Transaction

T = TypeVar("T")


class ThreadedStore(Store):
    """Lends each transaction in a thread of its own, as a server's threads do: Django has one connection in each."""

    def __init__(self, alias: str) -> None:
        self._store = DjangoStore(alias)

    def perform(self, command: Command[T]) -> T:
        self._store.actor = self.actor
        return self._store.perform(command)

    def transaction(self) -> Transaction:
        self._store.actor = self.actor
        return _InAThread(self._store.transaction())

    def open(self) -> None:
        self._store.open()

    def migrate(self) -> list[str]:
        return self._store.migrate()

    def close(self) -> None:
        self._store.close()


class _InAThread(Transaction):
    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction
        self._thread = ThreadPoolExecutor(1)

    def perform(self, command: Command[T]) -> T:
        try:
            return self._thread.submit(self._transaction.perform, command).result()
        finally:
            if isinstance(command, Undo):
                self._thread.shutdown()
                self._thread = ThreadPoolExecutor(1)  # It starts no thread before it is asked again.


class Request:
    """The context in which Django's ASGI handler serves one request: its sync code has a thread of its own."""

    def __init__(self) -> None:
        self.context = contextvars.copy_context()
        self._sensitive = ThreadSensitiveContext()
        self.context.run(SyncToAsync.thread_sensitive_context.set, self._sensitive)

    async def run(self, doing: Coroutine[Any, Any, T]) -> T:
        return await asyncio.get_running_loop().create_task(doing, context=self.context)

    def end(self) -> None:
        executor = SyncToAsync.context_to_thread_executor.pop(self._sensitive, None)
        if executor is not None:
            executor.shutdown()


class ConcurrentStore(AsyncStore):
    """Carries out each command, and lends each transaction, in a request of its own."""

    def __init__(self, alias: str) -> None:
        self._store = AsyncDjangoStore(alias)

    def perform(self, command: Command[T]) -> Step[T]:
        self._store.actor = self.actor
        request = Request()
        step: Step[T] = request.context.run(self._store.perform, command)
        step.add_done_callback(lambda _: request.end())
        return step

    def renew(self, command: Renew) -> frozenset[Hold]:
        return self._store.renew(command)

    def transaction(self) -> AsyncTransaction:
        self._store.actor = self.actor
        return _InARequest(self._store.transaction())

    async def open(self) -> None:
        await self._store.open()

    async def close(self) -> None:
        await self._store.close()


class _InARequest(AsyncTransaction):
    def __init__(self, transaction: AsyncTransaction) -> None:
        self._transaction = transaction
        self._request = Request()

    async def perform(self, command: Command[T]) -> T:
        try:
            return await self._request.run(self._transaction.perform(command))
        finally:
            if isinstance(command, Undo):
                self._request.end()
