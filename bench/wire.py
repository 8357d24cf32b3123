"""A proxy before PostgreSQL that counts round trips and statements. It changes nothing, and is part of no timed run.

A trip begins when a client that waits for nothing sends something, and ends when all that it asked for is answered:
what is sent ahead in a pipeline is one trip.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from tests.kit.carrier import Carrier, greet, message

_ASKS = frozenset({b"Q", b"S"})  # a query, or Sync: each is answered with "ready"
_FLUSH = b"H"
_GOODBYE = b"X"  # is not answered: the client waits for nothing
_READY = b"Z"
_DONE = frozenset({b"C", b"I", b"s"})  # a statement is complete, was empty, or has given as many rows as were asked for


@dataclass(frozen=True, slots=True)
class Traffic:
    """What has gone by."""

    trips: int
    statements: int


class Wire(Carrier):
    """Counts what is carried to the server of a URL."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.trips = 0
        self.statements = 0

    def seen(self) -> Traffic:
        """Say what has gone by so far."""
        return Traffic(self.trips, self.statements)

    async def carry(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        """Carry one connection, and count."""
        server, to_server = await asyncio.open_connection(*self.server)
        try:
            await greet(client, to_client, to_server)
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
        if kind == _GOODBYE:
            return
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


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, see: Callable[[bytes], None]) -> None:
    while True:
        kind, packet = await message(reader)
        see(kind)
        writer.write(packet)
        await writer.drain()
