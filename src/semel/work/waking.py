"""What wakes a relay before its time: NOTIFY of PostgreSQL, the data version of SQLite. Nothing depends on it.

A relay that has nothing to do falls asleep: on PostgreSQL it takes a lock exclusively, in a session of its own. ``add``
tries to have the same lock, shared, until its transaction ends. While the relay is awake that succeeds, and costs next
to nothing; while it sleeps that fails, and ``add`` notifies. So no transaction notifies while a relay is busy: one that
does waits for a lock of the whole database at COMMIT. The relay can't fall asleep while such a transaction is open.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable
from typing import Any, Protocol

from semel.stores import AsyncStore, Store
from semel.stores.outbox import sleep_lock

#: How often SQLite is asked whether anything was committed: it reads a counter in shared memory.
DATA_VERSION_EVERY = 0.02


class Waker(Protocol):
    """Wakes one relay."""

    async def fall_asleep(self) -> bool:
        """Begin to be woken; return whether one more look is needed, since something was added in the meantime."""

    async def wake_up(self) -> None:
        """Need not be woken any more."""

    async def close(self) -> None:
        """Let go of everything."""


class NoWaker:
    """Never wakes: the relay polls."""

    async def fall_asleep(self) -> bool:
        """Nothing will wake it."""
        return False

    async def wake_up(self) -> None:
        """Nothing is to be undone."""

    async def close(self) -> None:
        """Nothing is held."""


class _Bell:
    """Calls *wake* from any thread: in the relay's own thread, or on its loop."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self.loop: asyncio.AbstractEventLoop | None = None

    def ring(self) -> None:
        if self.loop is None:
            self._wake()
        elif not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self._wake)


class PostgresWaker:
    """Wakes by NOTIFY, on a direct connection that is opened when the relay first falls asleep."""

    def __init__(self, store: Any, to: str, wake: Callable[[], None], *, waits: bool) -> None:
        """Call *wake*, in the relay's thread or on its loop."""
        from semel.stores.postgres.sleeping import Sleeper  # noqa: PLC0415 - a store's own, where it is that one

        self._waits = waits
        self._bell = _Bell(wake)
        self._sleeper = Sleeper(store.address, sleep_lock(store.address.names, to), self._bell.ring)

    async def fall_asleep(self) -> bool:
        """Take the lock; where an open transaction has it, shared, stay awake."""
        if self._waits:
            self._bell.loop = asyncio.get_running_loop()
            return await asyncio.to_thread(self._sleeper.fall_asleep)
        return self._sleeper.fall_asleep()

    async def wake_up(self) -> None:
        """Free the lock."""
        if not self._sleeper.is_asleep:
            return
        if self._waits:
            await asyncio.to_thread(self._sleeper.wake_up)
        else:
            self._sleeper.wake_up()

    async def close(self) -> None:
        """Disconnect."""
        if self._waits:
            await asyncio.to_thread(self._sleeper.close)
        else:
            self._sleeper.close()


class SQLiteWaker:
    """Wakes when any other connection has committed to the file."""

    def __init__(self, store: Any, wake: Callable[[], None]) -> None:
        """Watch the file of *store*, from a thread, while the relay sleeps."""
        self._path = store.place.path
        self._bell = _Bell(wake)
        self._asleep: threading.Event | None = None

    async def fall_asleep(self) -> bool:
        """Begin to watch."""
        try:
            self._bell.loop = asyncio.get_running_loop()
        except RuntimeError:
            self._bell.loop = None
        ended = self._asleep = threading.Event()
        watched = threading.Event()
        threading.Thread(target=self._watch, args=(ended, watched), name="semel-data-version", daemon=True).start()
        watched.wait(1)
        return True

    async def wake_up(self) -> None:
        """Stop watching."""
        if self._asleep is not None:
            self._asleep.set()
            self._asleep = None

    async def close(self) -> None:
        """Stop watching."""
        await self.wake_up()

    def _watch(self, ended: threading.Event, watched: threading.Event) -> None:
        try:
            connection = sqlite3.connect(f"{self._path.as_uri()}?mode=ro", uri=True, isolation_level=None)
        except sqlite3.Error:
            watched.set()
            return
        try:
            before = connection.execute("PRAGMA data_version").fetchall()
            watched.set()
            while not ended.wait(DATA_VERSION_EVERY):
                if connection.execute("PRAGMA data_version").fetchall() != before:
                    self._bell.ring()
                    return
        except sqlite3.Error:
            return
        finally:
            connection.close()


def waker_of(store: Store | AsyncStore, to: str, wake: Callable[[], None]) -> Waker:
    """Return what can wake a relay of *store* at destination *to*."""
    durable: Any = getattr(store, "durable", store)
    if hasattr(durable, "address") and hasattr(durable.address, "names"):
        return PostgresWaker(durable, to, wake, waits=isinstance(store, AsyncStore))
    if hasattr(durable, "place"):
        return SQLiteWaker(durable, wake)
    return NoWaker()
