"""Answers in Redis, for an event loop. Nothing here raises, and nobody waits for longer than they said: a cache that
fails has no answer, and that is all.

Reads go out together, as those of a lane do. Writes have a connection and a task of their own, for which nobody waits.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from semel.stores.fair import MAX_BATCH
from semel.stores.lane import AsyncLane
from semel.stores.redis.address import Address
from semel.stores.redis.async_wires import AsyncWires
from semel.stores.redis.courier import Courier
from semel.stores.step import Step
from semel.stores.tiered import fuse
from semel.stores.tiered.breaker import Leave
from semel.stores.tiered.encoding import LARGEST
from semel.stores.tiered.entry import Entry
from semel.stores.tiered.talks import CLOSE_SECONDS, MOST_QUEUED, Talks, Wanted, unhurried


class AsyncCache:
    """The answers of one durable store in one Redis."""

    def __init__(self, address: Address, namespace: str) -> None:
        """Connect to nothing yet."""
        self.address = self._address = address
        self._talks = Talks(address, namespace)
        self._reading = fuse.reading(str(address))
        self._writing = fuse.writing(str(address))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._readers = AsyncWires(address)
        self._writers = AsyncWires(unhurried(address))
        self._queue: deque[tuple[Entry, int]] = deque()
        self._queued = 0
        self._work: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """See whether it is there, and say so if not: that is no reason not to serve."""
        self._bind()
        wires = AsyncWires(self._address)
        try:
            await wires.run(self._talks.greet(Courier(self._address)))
        except Exception as error:  # noqa: BLE001 - whatever it is, the durable store has the answers
            self._reading.failed(fuse.failure_of(error), error)
        finally:
            wires.drop()

    def get(self, scope: str, key: str) -> Step[Entry | None] | None:
        """Ask for the answer to a key; None: the cache is left alone."""
        self._bind()
        leave = self._reading.asked()
        if leave is Leave.ASK:
            return self._lane.submit(Wanted(scope, key))
        if leave is Leave.PROBE:
            self._is_probe_due = True
            self._start_work()
        return None

    def put(self, entry: Entry) -> None:
        """Have the answer written at some time soon, if there is room for it on the way."""
        self._bind()
        size = entry.size
        if size <= LARGEST and self._queued + size <= MOST_QUEUED and self._reading.is_closed:
            self._queue.append((entry, size))
            self._queued += size
            self._start_work()

    def forget(self) -> None:
        """Write nothing that has not been written yet."""
        self._queue.clear()
        self._queued = 0
        if self._work is not None and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._work.cancel)

    async def flush(self, seconds: float = CLOSE_SECONDS) -> None:
        """Wait until nothing is on its way any more."""
        if self._work is not None and asyncio.get_running_loop() is self._loop:
            await asyncio.wait([self._work], timeout=seconds)

    async def close(self) -> None:
        """Disconnect, once what is on its way has been written."""
        if asyncio.get_running_loop() is self._loop:
            await self.flush()
            if self._work is not None:
                self._work.cancel()
                await asyncio.wait([self._work])
            await self._lane.idle()
        self._readers.drop()
        self._writers.drop()

    def _bind(self) -> None:
        """Start afresh on the running loop: a connection belongs to the loop that made it."""
        loop = asyncio.get_running_loop()
        if loop is self._loop:
            return
        self._loop = loop
        self._readers.drop()
        self._writers.drop()
        self._reading.start_afresh()
        self._writing.start_afresh()
        self._read_courier, self._write_courier = Courier(self._address), Courier(self._address)
        self._lane = AsyncLane[Wanted](self._read)
        self._queue.clear()
        self._queued = 0
        self._is_probe_due = False
        self._work = None

    async def _read(self, batch: list[Wanted]) -> list[Any]:
        if not self._reading.is_closed:
            return [None] * len(batch)
        try:
            entries: list[Any] = await self._readers.run(self._talks.read(self._read_courier, batch))
        except Exception as error:  # noqa: BLE001 - as above
            self._reading.failed(fuse.failure_of(error), error)
            return [None] * len(batch)
        self._reading.succeeded()
        return entries

    def _start_work(self) -> None:
        if self._work is None and self._loop is not None:
            self._work = self._loop.create_task(self._do_work())

    async def _do_work(self) -> None:
        try:
            while self._queue or self._is_probe_due:
                if self._is_probe_due:
                    self._is_probe_due = False
                    await self._probe()
                batch = [self._queue.popleft() for _ in range(min(len(self._queue), MAX_BATCH))]
                self._queued -= sum(size for _, size in batch)
                if batch:
                    await self._write([entry for entry, _ in batch])
        finally:
            self._work = None

    async def _probe(self) -> None:
        try:
            await self._writers.run(self._talks.greet(self._write_courier))
        except Exception as error:  # noqa: BLE001 - as above
            self._reading.failed(fuse.failure_of(error), error)
        else:
            self._reading.succeeded()

    async def _write(self, batch: list[Entry]) -> None:
        if not self._reading.is_closed or self._writing.asked() is Leave.DO_WITHOUT:
            return
        try:
            refused = await self._writers.run(self._talks.write(self._write_courier, batch))
        except Exception as error:  # noqa: BLE001 - as above
            self._reading.failed(fuse.failure_of(error), error)
        else:
            fuse.note_written(refused, self._reading, self._writing)
