"""Finished answers in Redis, for threads and for an event loop. Nothing here raises, and no request waits for longer
than the configured limit: a cache that fails has no answer, and nothing else happens.

Reads go out together, as in a batcher. Writes are made in the background. The stored value is

    version   1 byte
    checksum  CRC-32 of all that follows: against accidents. A user who can write to this Redis can write any answer.
    fields    each after its length

and a value that can't be read with certainty is ignored: one that is cut off, of another key, or of a later version.
"""

from __future__ import annotations

import asyncio
import logging
import math
import struct
import threading
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from datetime import timedelta
from hashlib import sha256
from itertools import islice
from typing import Any

from semel.core.canonical import pack
from semel.core.commands import Command
from semel.core.message import Answer
from semel.core.scope import is_of
from semel.core.state import State
from semel.core.value import value
from semel.errors import StoreError, StoreRefused
from semel.stores.batching import AsyncBatcher, Batcher
from semel.stores.fair_queue import MAX_BATCH
from semel.stores.forks import start_afresh_in_children
from semel.stores.headers import read_back, written
from semel.stores.redis.address import Address
from semel.stores.redis.cluster import Client
from semel.stores.redis.connection import AsyncConnections, Connections
from semel.stores.redis.due import Walk
from semel.stores.redis.protocol import Call, Reply, packed
from semel.stores.step import Step
from semel.stores.tiered.memory import Entry, deadline, now
from semel.stores.transaction import at_once

#: Of an answer without a trace, and of one that ends with a trace: the first can be read by earlier editions.
VERSION = 1
WITH_TRACE = 2

#: Bytes. A larger entry would delay all that are sent with it.
MAX_ENTRY = 64 * 1024
#: Bytes of answers that wait to be written to Redis. If Redis is slower than the application, answers are dropped.
MAX_QUEUED = 4 * 1024 * 1024
#: A connection takes several round trips: TCP, TLS, a greeting.
ROUND_TRIPS_TO_CONNECT = 4
#: How long a write may take. No request waits for it, and it may be large.
WRITE_SECONDS = 1.0
#: How long the end of a process may wait for unwritten answers.
CLOSE_SECONDS = 1.0

#: A connection may be lost by chance, and the next one, too, while the server restarts.
MAX_FAILURES = 3
#: Seconds. A restart of Redis takes about one.
FIRST_PAUSE = 0.25
MAX_PAUSE = 30.0
#: Seconds after which a probe without an outcome is given up: its thread or its loop has ended.
PROBE_LIMIT = 10.0

#: Hexadecimal digits of a name: enough that two keys never have the same; and each entry has its scope and key in it.
_DIGITS = 40

#: The first bytes of a value, up to this one: what it is of, and its scope, are among them.
_HEAD = 16 * 1024

_SEAL = struct.Struct(">BI")
_LENGTH = struct.Struct(">Q")
_TIME = packed("TIME")

_logger = logging.getLogger("semel")


def name_of(prefix: str, namespace: str, scope: str, key: str) -> bytes:
    """Return the name of an answer in Redis. It is a digest: a client's key with braces could choose its own slot."""
    digest = sha256(pack(map(_bytes, (namespace, scope, key)))).hexdigest()
    return f"{prefix}:answer:{digest[:_DIGITS]}".encode()


def encoded(namespace: str, entry: Entry) -> bytes:
    """Return *entry* as bytes. Its expiry is set by the Redis command."""
    answer = entry.answer
    texts = (namespace, entry.scope, entry.key, entry.state, f"{entry.attempt}", f"{answer.status}")
    trace = () if entry.traceparent is None else (_bytes(entry.traceparent),)
    rest = pack(
        [
            *map(_bytes, texts),
            b"1" if entry.is_accepted else b"",
            entry.token,
            entry.fingerprint,
            _bytes(written(answer.headers)),
            b"" if entry.steps is None else b"=" + _bytes(entry.steps),
            b"" if answer.body is None else b"=" + answer.body,
            *trace,
        ]
    )
    return _SEAL.pack(WITH_TRACE if trace else VERSION, zlib.crc32(rest)) + rest


def decoded(namespace: str, scope: str, key: str, value: object, until: float) -> Entry | None:
    """Return the answer in *value*, if it belongs to exactly this key, to be kept until *until*."""
    try:
        return _decoded(namespace, scope, key, value, until) if isinstance(value, bytes) else None
    except Exception:  # noqa: BLE001 - whatever is wrong with it, the durable store has the answer
        return None


def _decoded(namespace: str, scope: str, key: str, value: bytes, until: float) -> Entry | None:
    version, checksum = _SEAL.unpack_from(value)
    rest = value[_SEAL.size :]
    if version not in {VERSION, WITH_TRACE} or zlib.crc32(rest) != checksum:
        return None
    fields = list(_fields(rest))
    trace = _text(fields.pop()) if version == WITH_TRACE else None
    *owner, state, attempt, status, accepted, token, fingerprint, headers, steps, body = fields
    if owner != [*map(_bytes, (namespace, scope, key))]:
        return None
    answer = Answer(int(status), read_back(_text(headers)), body[1:] if body else None)
    ended = (State(state.decode()), int(attempt), token, fingerprint, answer, _text(steps[1:]) if steps else None)
    return Entry(scope, key, *ended, is_accepted=bool(accepted), deadline=until, traceparent=trace)


def _fields(rest: bytes) -> Iterator[bytes]:
    place = 0
    while place < len(rest):
        (length,) = _LENGTH.unpack_from(rest, place)
        place += _LENGTH.size + length
        yield rest[place - length : place]


def _may_be_of(owner: str, head: bytes) -> bool:
    """Whether a value that begins with *head* is an answer of *owner*, or can't be read."""
    try:
        _, scope = islice(_fields(head[_SEAL.size :]), 2)
        return len(head) > _HEAD or is_of(_text(scope), owner)
    except (struct.error, ValueError):
        return True


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


@value
class RedisClock:
    """The time of a Redis server, and when it was read.

    The expiry of an answer is sent as a time of the server's own clock: if a server hangs and carries the command out
    late, the answer must not be kept for that much longer.
    """

    #: Milliseconds since 1970, as the server counts them.
    time: int
    heard_at: float

    @classmethod
    def read(cls, reply: Any, heard_at: float) -> RedisClock:
        """Read the reply to TIME: seconds and microseconds."""
        seconds, microseconds = reply
        return cls(int(seconds) * 1000 + int(microseconds) // 1000, heard_at)

    def at(self, until: float) -> int:
        """Return the server's time at *until*, or an earlier one: its clock has advanced since it was read."""
        return self.time + math.floor((until - self.heard_at) * 1000)


class Breaker:
    """A circuit breaker: whether a cache is used. After a few failures in a row, or one time-out, it is not; after a
    pause one probe is sent, and the pause doubles with each that fails. Any number of threads may use it.
    """

    def __init__(self, where: str, *, opened: str, closed: str) -> None:
        """Log *where* and *opened*, with the reason, when the cache is not used, and *closed* when it is used again."""
        self._where = where
        self._opened = opened
        self._closed = closed
        self.start_afresh()

    def start_afresh(self) -> None:
        """Start without failures."""
        self._mutex = threading.Lock()
        self._failures = 0
        self._pause = FIRST_PAUSE
        #: When a probe may be sent; None: the cache is used.
        self._until: float | None = None
        self._is_probing = False

    @property
    def is_closed(self) -> bool:
        """Whether the cache is used."""
        return self._until is None

    @property
    def is_probing(self) -> bool:
        """Whether a probe is under way."""
        return self._is_probing

    def may_probe(self) -> bool:
        """Whether it is time for a probe, which the caller then sends."""
        with self._mutex:
            if self._until is None or now() < self._until:
                return False
            self._until, self._is_probing = now() + PROBE_LIMIT, True
            return True

    def succeeded(self) -> None:
        """Note that the cache has answered."""
        if self._until is None and not self._failures:
            return
        with self._mutex:
            if self._until is not None and not self._is_probing:
                return  # A late answer from before the failure.
            is_back = self._until is not None
            self._failures, self._pause, self._until, self._is_probing = 0, FIRST_PAUSE, None, False
        if is_back:
            _logger.warning("%s %s", self._where, self._closed)

    def failed(self, error: BaseException) -> None:
        """Note that the cache has failed."""
        with self._mutex:
            is_new = self._until is None
            if is_new:
                # Every request would wait for a server that hangs.
                self._failures += MAX_FAILURES if _is_too_slow(error) else 1
                if self._failures < MAX_FAILURES:
                    return
            elif self._is_probing:
                self._pause = min(2 * self._pause, MAX_PAUSE)
            else:
                return  # This command was under way when the breaker opened.
            self._until, self._is_probing = now() + self._pause, False
        if is_new:
            _logger.warning("%s %s: %s", self._where, self._opened, error)


def _is_too_slow(error: BaseException) -> bool:
    return isinstance(error, TimeoutError) or isinstance(error.__cause__, TimeoutError)


@value
class Wanted(Command[Entry | None]):
    """A request asks for the answer to a key."""

    scope: str
    key: str


class _Answers:
    """The answers of one durable store in one Redis: the part that sync and async share."""

    def __init__(self, url: str, limit: timedelta, namespace: str) -> None:
        """Connect to nothing yet. A request waits for the cache no longer than *limit*."""
        seconds = limit.total_seconds()
        connect = ROUND_TRIPS_TO_CONNECT * seconds
        self.address = replace(Address.of(url), connect_seconds=connect, command_seconds=seconds, is_durable=False)
        #: For commands that no request waits for.
        self._patient = replace(
            self.address, connect_seconds=max(connect, WRITE_SECONDS), command_seconds=max(seconds, WRITE_SECONDS)
        )
        self._namespace = namespace
        where = f"The cache {self.address}"
        self.reading = Breaker(
            where, opened="is not used for now, and the durable store answers", closed="is used again."
        )
        self.writing = Breaker(where, opened="gets no answers for now", closed="gets answers again.")
        self._queue: deque[tuple[Entry, int]] = deque()
        self._queued = 0

    def _reset(self) -> None:
        self.reading.start_afresh()
        self.writing.start_afresh()
        self._queue = deque()
        self._queued = 0

    def _takes(self, entry: Entry) -> bool:
        """Queue *entry* if it should be written; return whether it was. If Redis is not used, it may be a probe."""
        size = entry.size
        if size > MAX_ENTRY or self._queued + size > MAX_QUEUED:
            return False
        used = self.writing if self.reading.is_closed else self.reading
        if not (used.is_closed or used.may_probe()):
            return False
        self._queue.append((entry, size))
        self._queued += size
        return True

    def _next(self) -> list[Entry]:
        batch = [self._queue.popleft() for _ in range(min(len(self._queue), MAX_BATCH))]
        self._queued -= sum(size for _, size in batch)
        return [entry for entry, _ in batch]

    async def greet(self, client: Client) -> None:
        """Check whether it can be reached, and log if not: the store serves without it."""
        try:
            await client.read_one(Call(b"semel", _TIME))
        except Exception as error:  # noqa: BLE001 - whatever it is, the durable store has the answers
            self.reading.failed(error)

    async def read(self, client: Client, wanted: Sequence[Wanted]) -> list[Any]:
        """Read answers; one that is not there, or can't be read, is None.

        An answer is read by two commands: first its remaining time, then its value. If another answer replaces it in
        between, that one is kept, for a shorter time than it could be.
        """
        if not self.reading.is_closed:
            return [None] * len(wanted)
        asked_at = now()
        calls = []
        for each in wanted:
            name = name_of(self.address.prefix, self._namespace, each.scope, each.key)
            calls += [Call(name, packed(b"PTTL", name)), Call(name, packed(b"GET", name))]
        try:
            replies = await client.execute(calls)
            _refuse_failures(replies)
        except Exception as error:  # noqa: BLE001 - whatever it is, the durable store has the answers
            self.reading.failed(error)
            return [None] * len(wanted)
        self.reading.succeeded()
        return [
            decoded(self._namespace, each.scope, each.key, found, deadline(asked_at, left / 1000))
            if isinstance(left, int) and left > 0
            else None
            for each, left, found in zip(wanted, replies[::2], replies[1::2], strict=True)
        ]

    async def write(self, client: Client, entries: Sequence[Entry]) -> None:
        """Write answers."""
        used = self.writing if self.reading.is_closed else self.reading
        if not (used.is_closed or used.is_probing):
            return
        named = [(name_of(self.address.prefix, self._namespace, entry.scope, entry.key), entry) for entry in entries]
        # In a Cluster each server has its own clock.
        asked = named if self.address.kind == "cluster" else named[:1]
        try:
            times = await client.read([Call(name, _TIME) for name, _ in asked])
            heard_at = now()
            clocks = [RedisClock.read(each, heard_at) for each in times] * (len(named) // len(times))
            calls = [
                Call(name, packed(b"SET", name, encoded(self._namespace, entry), b"PXAT", clock.at(entry.deadline)))
                for (name, entry), clock in zip(named, clocks, strict=True)
            ]
            replies = await client.execute(calls)
        except Exception as error:  # noqa: BLE001 - as above
            self.reading.failed(error)
            return
        refused = next((reply for reply in replies if isinstance(reply, StoreError)), None)
        if refused is not None and refused.__cause__ is not None:
            self.reading.failed(refused)  # Its clock could not be read.
            return
        self.reading.succeeded()
        if refused is None:
            self.writing.succeeded()
        else:
            self.writing.failed(refused)

    async def delete(self, client: Client, owner: str) -> int:
        """Delete the answers of one owner, and return how many. This one raises: what was to be erased must not stay
        there unnoticed.

        It looks at every answer. A namespace tells how a process spells its durable store, and others may spell it in
        another way; and an answer that is deleted without need, of another store or a later version, costs a statement.
        """
        walk, count = Walk(f"{self.address.prefix}:answer:*", "string"), 0
        while True:
            names = list(await walk.stretch(client, 1))
            heads = await client.read([Call(name, packed("GETRANGE", name, 0, _HEAD)) for name in names])
            own = [name for name, head in zip(names, heads, strict=True) if _may_be_of(owner, head)]
            count += sum(await client.read([Call(name, packed("DEL", name)) for name in own]))
            if walk.is_at_end:
                return count


class Cache(_Answers):
    """The same for threads. The thread that finds the connection free reads for all that wait."""

    def __init__(self, url: str, limit: timedelta, namespace: str) -> None:
        """Connect to nothing yet."""
        super().__init__(url, limit, namespace)
        self.start_afresh()
        start_afresh_in_children(self)

    def start_afresh(self) -> None:
        """Start with no connection and no thread."""
        self._reset()
        self._mutex = threading.Lock()
        self._is_writing = False
        self._readers, self._writers = Connections(self.address), Connections(self._patient)
        reader = Client(self.address, self._readers)
        self._batcher = Batcher[Wanted](lambda batch: at_once(self.read(reader, batch)))
        self._writer = Client(self._patient, self._writers)
        self._thread = ThreadPoolExecutor(1, "semel-cache")

    def open(self) -> None:
        """Check whether it can be reached."""
        connections = Connections(self.address)
        at_once(self.greet(Client(self.address, connections)))
        connections.close()

    def get(self, scope: str, key: str) -> Entry | None:
        """Return the answer to a key, if it is there and arrives in time."""
        if not self.reading.is_closed:
            return None
        try:
            found: Entry | None = self._batcher.submit(Wanted(scope, key))
        except StoreError:
            # The thread that was reading for this one was interrupted.
            return None
        return found

    def put(self, entry: Entry) -> None:
        """Queue the answer to be written soon, if the queue has room."""
        with self._mutex:
            if self._takes(entry) and not self._is_writing:
                self._is_writing = True
                self._thread.submit(self._write)

    def erase(self, owner: str) -> int:
        """Delete the answers of one owner, after all queued ones are written."""
        return self._thread.submit(lambda: at_once(self.delete(self._writer, owner))).result()

    def flush(self, seconds: float = CLOSE_SECONDS) -> None:
        """Wait until all queued answers are written."""
        wait([self._thread.submit(lambda: None)], seconds)

    #: For tests that move time: queued answers are written, and can be deleted.
    forget = flush

    def close(self) -> None:
        """Disconnect, after all queued answers are written. Another use connects again."""
        self.flush()
        with self._mutex:
            thread, self._thread = self._thread, ThreadPoolExecutor(1, "semel-cache")
        thread.shutdown()
        self._readers.close()
        self._writers.close()

    def _write(self) -> None:
        while True:
            with self._mutex:
                batch = self._next()
                if not batch:
                    self._is_writing = False
                    return
            at_once(self.write(self._writer, batch))


class AsyncCache(_Answers):
    """The same for an event loop. Writes have their own task."""

    def __init__(self, url: str, limit: timedelta, namespace: str) -> None:
        """Connect to nothing yet."""
        super().__init__(url, limit, namespace)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._readers, self._writers = AsyncConnections(self.address), AsyncConnections(self._patient)
        self._work: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Check whether it can be reached."""
        connections = AsyncConnections(self.address)
        await self.greet(Client(self.address, connections))
        connections.drop()

    def get(self, scope: str, key: str) -> Step[Entry | None] | None:
        """Read the answer to a key; None: the cache is not used now."""
        self._bind()
        return self._batcher.submit(Wanted(scope, key)) if self.reading.is_closed else None

    def put(self, entry: Entry) -> None:
        """Queue the answer to be written soon, if the queue has room."""
        loop = self._bind()
        if self._takes(entry) and self._work is None:
            self._work = loop.create_task(self._write())

    def forget(self) -> None:
        """Drop the queued answers. If the loop runs in another thread, wait for it."""
        self._queue.clear()
        self._queued = 0
        loop, work = self._loop, self._work
        if work is None or loop is None or loop.is_closed():
            return
        if not loop.is_running() or asyncio._get_running_loop() is loop:  # noqa: SLF001 - documented, and raises nothing
            # Not by a callback of the loop: a step of the writing task might run before it.
            work.cancel()
            return
        stopped = threading.Event()
        loop.call_soon_threadsafe(work.add_done_callback, lambda _: stopped.set())
        loop.call_soon_threadsafe(work.cancel)
        stopped.wait(CLOSE_SECONDS)

    async def erase(self, owner: str) -> int:
        """Delete the answers of one owner, after all queued ones are written."""
        await self.flush()
        # A connection of its own: that of the writing task may be in use.
        connections = AsyncConnections(self._patient)
        try:
            return await self.delete(Client(self._patient, connections), owner)
        finally:
            connections.drop()

    async def flush(self, seconds: float = CLOSE_SECONDS) -> None:
        """Wait until all queued answers are written."""
        if self._work is not None and asyncio.get_running_loop() is self._loop:
            await asyncio.wait([self._work], timeout=seconds)

    async def close(self) -> None:
        """Disconnect, after all queued answers are written."""
        if asyncio.get_running_loop() is self._loop:
            await self.flush()
            if self._work is not None:
                self._work.cancel()
                await asyncio.wait([self._work])
            await self._batcher.idle()
        self._readers.drop()
        self._writers.drop()

    def _bind(self) -> asyncio.AbstractEventLoop:
        """Start again on the running loop: a connection belongs to the loop that made it."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop = loop
            self._readers.drop()
            self._writers.drop()
            self._reset()
            reader = Client(self.address, self._readers)
            self._batcher = AsyncBatcher[Wanted](lambda batch: self.read(reader, batch))
            self._writer = Client(self._patient, self._writers)
            self._work = None
        return loop

    async def _write(self) -> None:
        try:
            while batch := self._next():
                await self.write(self._writer, batch)
        finally:
            self._work = None


def _refuse_failures(replies: Sequence[Reply]) -> None:
    """Raise an error of the server. A value of another type, which is not Semel's, is not an error."""
    for reply in replies:
        if isinstance(reply, StoreError) and not isinstance(reply, StoreRefused):
            raise reply
