"""Answers in Redis, for threads. Nothing here raises, and nobody waits for longer than they said: a cache that fails
has no answer, and that is all.

Reading is done by whichever thread finds the connection free, for all that wait. Writing is done by a thread of its
own, which also looks whether a cache that was away is there again.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

from semel.errors import StoreError
from semel.stores.fair import MAX_BATCH
from semel.stores.forks import start_afresh_in_children
from semel.stores.lane import Lane
from semel.stores.redis.address import Address
from semel.stores.redis.courier import Courier
from semel.stores.redis.wires import Wires
from semel.stores.tiered import fuse
from semel.stores.tiered.breaker import Leave
from semel.stores.tiered.encoding import LARGEST
from semel.stores.tiered.entry import Entry
from semel.stores.tiered.talks import CLOSE_SECONDS, MOST_QUEUED, Talks, Wanted, unhurried


class Cache:
    """The answers of one durable store in one Redis."""

    _queue: deque[tuple[Entry, int]]
    _changed: threading.Condition
    _thread: threading.Thread | None

    def __init__(self, address: Address, namespace: str) -> None:
        """Connect to nothing yet."""
        self.address = self._address = address
        self._talks = Talks(address, namespace)
        self._reading = fuse.reading(str(address))
        self._writing = fuse.writing(str(address))
        self.start_afresh()
        start_afresh_in_children(self)

    def start_afresh(self) -> None:
        """Have no connection, and no thread."""
        self._reading.start_afresh()
        self._writing.start_afresh()
        self._wires, self._courier = Wires(self._address), Courier(self._address)
        self._lane = Lane[Wanted](self._read)
        self._queue = deque()
        self._queued = 0
        self._is_probe_due = False
        self._is_busy = False
        self._changed = threading.Condition()
        self._thread = None

    def open(self) -> None:
        """See whether it is there, and say so if not: that is no reason not to serve."""
        wires = Wires(self._address)
        try:
            wires.run(self._talks.greet(Courier(self._address)))
        except Exception as error:  # noqa: BLE001 - whatever it is, the durable store has the answers
            self._reading.failed(fuse.failure_of(error), error)
        finally:
            wires.close()

    def get(self, scope: str, key: str) -> Entry | None:
        """Return the answer to a key, if it is there and can be had in time."""
        leave = self._reading.asked()
        if leave is Leave.PROBE:
            with self._changed:
                self._is_probe_due = True
                self._start_work()
        if leave is not Leave.ASK:
            return None
        try:
            found: Entry | None = self._lane.submit(Wanted(scope, key))
        except StoreError:
            # The thread that was reading for us was interrupted.
            return None
        return found

    def put(self, entry: Entry) -> None:
        """Have the answer written at some time soon, if there is room for it on the way."""
        size = entry.size
        if size > LARGEST or not self._reading.is_closed:
            return
        with self._changed:
            if self._queued + size <= MOST_QUEUED:
                self._queue.append((entry, size))
                self._queued += size
                self._start_work()

    def flush(self, seconds: float = CLOSE_SECONDS) -> None:
        """Wait until nothing is on its way any more."""
        with self._changed:
            self._changed.wait_for(lambda: not (self._queue or self._is_busy), seconds)

    def close(self) -> None:
        """Disconnect, once what is on its way has been written."""
        self.flush()
        with self._changed:
            thread, self._thread = self._thread, None
            self._changed.notify_all()
        if thread is not None:
            thread.join()
        self._wires.close()

    def _read(self, batch: list[Wanted]) -> list[Any]:
        if not self._reading.is_closed:
            return [None] * len(batch)
        try:
            entries: list[Any] = self._wires.run(self._talks.read(self._courier, batch))
        except Exception as error:  # noqa: BLE001 - whatever it is, the durable store has the answers
            self._reading.failed(fuse.failure_of(error), error)
            return [None] * len(batch)
        self._reading.succeeded()
        return entries

    def _start_work(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="semel-cache", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _work(self) -> None:
        changed, thread = self._changed, threading.current_thread()
        wires, courier = Wires(unhurried(self._address)), Courier(self._address)
        try:
            while True:
                with changed:
                    self._is_busy = False
                    changed.notify_all()
                    changed.wait_for(lambda: self._queue or self._is_probe_due or self._thread is not thread)
                    if self._thread is not thread:
                        return
                    self._is_busy = True
                    is_probe_due, self._is_probe_due = self._is_probe_due, False
                    batch = [self._queue.popleft() for _ in range(min(len(self._queue), MAX_BATCH))]
                    self._queued -= sum(size for _, size in batch)
                if is_probe_due:
                    self._probe(wires, courier)
                if batch:
                    self._write(wires, courier, [entry for entry, _ in batch])
        finally:
            wires.close()

    def _probe(self, wires: Wires, courier: Courier) -> None:
        try:
            wires.run(self._talks.greet(courier))
        except Exception as error:  # noqa: BLE001 - the thread must live to try again
            self._reading.failed(fuse.failure_of(error), error)
        else:
            self._reading.succeeded()

    def _write(self, wires: Wires, courier: Courier, batch: list[Entry]) -> None:
        if not self._reading.is_closed or self._writing.asked() is Leave.DO_WITHOUT:
            return
        try:
            refused = wires.run(self._talks.write(courier, batch))
        except Exception as error:  # noqa: BLE001 - as above
            self._reading.failed(fuse.failure_of(error), error)
            return
        fuse.note_written(refused, self._reading, self._writing)
