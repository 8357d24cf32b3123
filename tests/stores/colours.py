"""A store in either colour, for tests that say the same of both. The async one has a loop in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

from semel.core.commands import Command
from semel.core.record import Hold
from semel.stores import async_store, store
from semel.stores.leases import AsyncLeases, Leases

T = TypeVar("T")

SECONDS = 30  # only what is broken is waited for that long
COLOURS = ("sync", "async")


class Process(ABC):
    """A store, and a leases of leases on it: as much of an application's process as tests here need."""

    store: Any

    @abstractmethod
    def perform(self, command: Command[T]) -> T: ...

    @abstractmethod
    def listen(self, on_end: Callable[[str], None]) -> None: ...

    @abstractmethod
    def keep(self, hold: Hold, lease: timedelta, on_lost: Callable[[], None]) -> None: ...

    @abstractmethod
    def close_store(self) -> None: ...

    @abstractmethod
    def close(self) -> None: ...


class SyncProcess(Process):
    def __init__(self, url: str) -> None:
        self.store = store(url)
        self.leases = Leases(self.store.perform, self.store.watch)

    def perform(self, command: Command[T]) -> T:
        outcome: T = self.store.perform(command)
        return outcome

    def listen(self, on_end: Callable[[str], None]) -> None:
        self.store.listen(on_end)

    def keep(self, hold: Hold, lease: timedelta, on_lost: Callable[[], None]) -> None:
        self.leases.add(hold, lease, on_lost)

    def close_store(self) -> None:
        self.store.close()

    def close(self) -> None:
        self.leases.close()
        self.store.close()


class AsyncProcess(Process):
    def __init__(self, url: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.store = async_store(url)
        self.leases = AsyncLeases(self.store.renew, self.store.watch)

    def perform(self, command: Command[T]) -> T:
        async def ask() -> T:
            outcome: T = await self.store.perform(command)
            return outcome

        return self._run(ask())

    def listen(self, on_end: Callable[[str], None]) -> None:
        self._call(self.store.listen, on_end)

    def keep(self, hold: Hold, lease: timedelta, on_lost: Callable[[], None]) -> None:
        self._call(self.leases.add, hold, lease, on_lost)

    def close_store(self) -> None:
        self._run(self.store.close())

    def close(self) -> None:
        self._call(self.leases.close)
        self._run(self.store.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(SECONDS)
        self._loop.close()

    def _run(self, running: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(running, self._loop).result(SECONDS)

    def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        async def call() -> None:
            function(*arguments)

        self._run(call())


@contextmanager
def process(colour: str, url: str) -> Iterator[Process]:
    made = SyncProcess(url) if colour == "sync" else AsyncProcess(url)
    try:
        yield made
    finally:
        made.close()


def wait_until(is_so: Callable[[], Any]) -> None:
    """Look again and again, until it is so."""
    pause = threading.Event()
    for _ in range(SECONDS * 100):
        if is_so():
            return
        pause.wait(0.01)
    raise AssertionError("It never happened.")
