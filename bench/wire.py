"""A proxy before PostgreSQL that counts round trips and statements. It changes nothing, and is part of no timed run.

A trip begins when a client that waits for nothing sends something, and ends when all that it asked for is answered:
what is sent ahead in a pipeline is one trip.
"""

from __future__ import annotations

import asyncio
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

from bench.load import LOOPBACK

#: What a client may ask before it greets: for TLS, or GSS. The answer is no.
_TLS, _GSS = 80877103, 80877104

_ASKS = frozenset({b"Q", b"S"})  # a query, or Sync: each is answered with "ready"
_FLUSH = b"H"
_READY = b"Z"
_DONE = frozenset({b"C", b"I", b"s"})  # a statement is complete, was empty, or has given as many rows as were asked for


@dataclass(frozen=True, slots=True)
class Traffic:
    """What has gone by."""

    trips: int
    statements: int


class Wire:
    """Carries connections from a free port to the server of a URL, in a thread of its own."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.server = parts.hostname or LOOPBACK, parts.port or 5432
        self.trips = 0
        self.statements = 0
        self._port = 0
        self._links: set[asyncio.Task[None]] = set()
        self._is_listening = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="wire", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._is_listening.wait()
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def address(self, url: str) -> str:
        """Return *url*, led through here."""
        parts = urlsplit(url)
        user, at, _ = parts.netloc.rpartition("@")
        return parts._replace(netloc=f"{user}{at}{LOOPBACK}:{self._port}").geturl()

    def seen(self) -> Traffic:
        """Say what has gone by so far."""
        return Traffic(self.trips, self.statements)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._listen())

    async def _listen(self) -> None:
        server = await asyncio.start_server(self._begin, LOOPBACK, 0)
        self._port = server.sockets[0].getsockname()[1]
        self._is_listening.set()
        await self._stop.wait()
        server.close()
        for link in self._links:
            link.cancel()
        await asyncio.gather(*self._links, return_exceptions=True)

    def _begin(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = asyncio.get_running_loop().create_task(self._carry(reader, writer))
        self._links.add(link)
        link.add_done_callback(self._links.discard)

    async def _carry(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        server, to_server = await asyncio.open_connection(*self.server)
        try:
            await _greet(client, to_client, to_server)
            link = _Link(self)
            async with asyncio.TaskGroup() as ways:
                ways.create_task(_pass_on(client, to_server, link.asked))
                ways.create_task(_pass_on(server, to_client, link.answered))
        except* (OSError, asyncio.IncompleteReadError):
            pass  # one side has closed
        finally:
            to_client.close()
            to_server.close()


class _Link:
    """Where one connection stands."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        #: How many times the server has yet to say that it is ready: for the greeting, too.
        self._owed = 1
        self._is_under_way = True
        self._is_flushed = False

    def asked(self, kind: bytes) -> None:
        if not self._is_under_way:
            self._is_under_way = True
            self._wire.trips += 1
        self._owed += kind in _ASKS
        self._is_flushed = kind == _FLUSH

    def answered(self, kind: bytes) -> None:
        self._owed -= kind == _READY
        self._wire.statements += kind in _DONE
        # What is flushed is answered without "ready".
        if self._owed == 0 and (kind == _READY or self._is_flushed):
            self._is_under_way = False


async def _greet(
    client: asyncio.StreamReader, to_client: asyncio.StreamWriter, to_server: asyncio.StreamWriter
) -> None:
    """Pass the greeting on: it alone has no kind."""
    while True:
        head = await client.readexactly(8)
        length, code = struct.unpack("!II", head)
        if code not in {_TLS, _GSS}:
            to_server.write(head + await client.readexactly(length - len(head)))
            return
        to_client.write(b"N")


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, see: Callable[[bytes], None]) -> None:
    while True:
        head = await reader.readexactly(5)
        see(head[:1])
        writer.write(head + await reader.readexactly(int.from_bytes(head[1:]) - 4))
        await writer.drain()
