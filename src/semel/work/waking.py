"""What wakes a relay before its time: NOTIFY of PostgreSQL, the data version of SQLite. Nothing depends on it.

A relay that has nothing to do falls asleep: on PostgreSQL it takes a lock exclusively, in a session of its own. ``add``
tries to have the same lock, shared, until its transaction ends. While the relay is awake that succeeds, and costs next
to nothing; while it sleeps that fails, and ``add`` notifies. So no transaction notifies while a relay is busy: one that
does waits for a lock of the whole database at COMMIT. The relay can't fall asleep while such a transaction is open, nor
where the server lets transactions be prepared: one that has notified can't be.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from semel.stores import AsyncStore, Store
from semel.stores.dialect import durable_of
from semel.stores.forks import importing, leave_alone, start_afresh_in_children
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
        else:
            with suppress(RuntimeError):  # It is closed.
                self.loop.call_soon_threadsafe(self._wake)


class PostgresWaker:
    """Wakes by NOTIFY, on a direct connection that is opened when the relay first falls asleep."""

    def __init__(self, store: Any, to: str, wake: Callable[[], None], *, waits: bool) -> None:
        """Call *wake*, in the relay's thread or on its loop."""
        with importing:
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
    """Wakes when any other connection has committed to the file. One thread watches it while the relay sleeps."""

    def __init__(self, store: Any, wake: Callable[[], None], *, waits: bool) -> None:
        """Watch the file of *store*, and call *wake*, in the relay's thread or on its loop."""
        self._path = store.place.path
        self._waits = waits
        self._bell = _Bell(wake)
        self._watch = _Watch(self._path, self._bell)
        start_afresh_in_children(self)

    async def fall_asleep(self) -> bool:
        """Begin to watch."""
        if self._waits:
            self._bell.loop = asyncio.get_running_loop()
            await asyncio.to_thread(self._watch.begin)
        else:
            self._watch.begin()
        return True

    async def wake_up(self) -> None:
        """Stop watching."""
        self._watch.asleep.clear()

    async def close(self) -> None:
        """Stop watching, and let the thread end."""
        self._watch.end()
        self._watch = _Watch(self._path, self._bell)

    def start_afresh(self) -> None:
        """Watch nothing: in a forked child the thread does not exist, and the connection is the parent's."""
        leave_alone(self._watch)
        self._watch = _Watch(self._path, self._bell)


class _Watch:
    """One thread with one connection, both made on first use."""

    def __init__(self, path: Path, bell: _Bell) -> None:
        self._path = path
        self._bell = bell
        self._mutex = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._connection: sqlite3.Connection | None = None
        self._before: object = None
        #: Set while there is something to be woken.
        self.asleep = threading.Event()

    def begin(self) -> None:
        """Watch for what is committed from now on."""
        with self._mutex:
            try:
                self._before = self._version()
            except sqlite3.OperationalError:
                self._before = None  # It is locked, so it is about to change; or gone, and is polled.
            self.asleep.set()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="semel-data-version", daemon=True)
                self._thread.start()

    def end(self) -> None:
        self._ended.set()
        self.asleep.set()

    def _run(self) -> None:
        while self.asleep.wait() and not self._ended.wait(DATA_VERSION_EVERY):
            with self._mutex, suppress(sqlite3.OperationalError):
                if self.asleep.is_set() and self._version() != self._before:
                    self.asleep.clear()
                    self._bell.ring()
        with self._mutex:
            if self._connection is not None:
                self._connection.close()

    def _version(self) -> object:
        if self._connection is None:
            # It never waits for a lock: the thread looks again soon, and a relay that falls asleep is not held up.
            where = f"{self._path.as_uri()}?mode=ro"
            self._connection = sqlite3.connect(
                where, uri=True, timeout=0, isolation_level=None, check_same_thread=False
            )
        return self._connection.execute("PRAGMA data_version").fetchall()


def waker_of(store: Store | AsyncStore, to: str, wake: Callable[[], None]) -> Waker:
    """Return what can wake a relay of *store* at destination *to*."""
    durable: Any = durable_of(store)
    if hasattr(durable, "address") and hasattr(durable.address, "names"):
        return PostgresWaker(durable, to, wake, waits=isinstance(store, AsyncStore))
    if hasattr(durable, "place"):
        return SQLiteWaker(durable, wake, waits=isinstance(store, AsyncStore))
    return NoWaker()
