"""Carries connections from a free port of this machine to a PostgreSQL server. What is done with what is carried, a
subclass says: ``bench/wire.py`` counts it, ``torture/proxy.py`` loses some of it.

There is no encryption: a client that asks for it is told so.
"""

from __future__ import annotations

import asyncio
import struct
import threading
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

from tests.kit.servers import LOOPBACK

#: What a client sends before all else, in place of a version: whether TLS or GSS may be spoken; stop a statement.
_TLS, _GSS, _CANCEL = 80877103, 80877104, 80877102


class Carrier(ABC):
    """Listens in a thread of its own, which has an event loop."""

    def __init__(self, url: str) -> None:
        """Stand before the server of *url*."""
        parts = urlsplit(url)
        self.server = parts.hostname or LOOPBACK, parts.port or 5432
        self._port = 0
        self._links: set[asyncio.Task[None]] = set()
        self._is_listening = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="carrier", daemon=True)

    def address(self, url: str) -> str:
        """Return *url*, led through here."""
        parts = urlsplit(url)
        user, at, _ = parts.netloc.rpartition("@")
        return parts._replace(netloc=f"{user}{at}{LOOPBACK}:{self._port}").geturl()

    def __enter__(self) -> Self:
        self._thread.start()
        self._is_listening.wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    @abstractmethod
    async def carry(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        """Carry one connection until it ends."""

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

    def _begin(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        link = asyncio.get_running_loop().create_task(self.carry(client, to_client))
        self._links.add(link)
        link.add_done_callback(self._links.discard)


async def greet(client: asyncio.StreamReader, to_client: asyncio.StreamWriter, to_server: asyncio.StreamWriter) -> bool:
    """Pass the greeting on, which alone has no kind; say whether a session follows."""
    while True:
        head = await client.readexactly(8)
        length, code = struct.unpack("!II", head)
        if code in {_TLS, _GSS}:
            to_client.write(b"N")
            continue
        to_server.write(head + await client.readexactly(length - len(head)))
        return bool(code != _CANCEL)


async def message(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """Read one message; return its kind, and all of it."""
    head = await reader.readexactly(5)
    return head[:1], head + await reader.readexactly(int.from_bytes(head[1:]) - 4)
