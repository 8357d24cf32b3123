"""A piece of network, which can be cut and healed. It knows nothing of what is sent over it.

While it is cut, it is silent, as a network is: what was connected stays so and gets no byte, and what connects is
answered by no byte. When it heals, all of that is reset, and new connections get through. Or else, when it is cut, it
resets every connection, as a kernel does of its own accord once a silent network has left bytes unconfirmed for too
long: here they are always confirmed, by the forwarder.

It can be slow, too: each byte arrives after a *delay*, and no more than *rate* of them in a second, one way.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Coroutine
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from tests.kit.servers.base import LOOPBACK

_CHUNK_BYTES = 1 << 16
_SMALL_BUFFER = 1 << 14


class Forwarder:
    """Carries every connection to *port* on to another port, in a thread of its own."""

    def __init__(self, port: int, target: int, *, delay: float = 0.0, rate: float = float("inf")) -> None:
        """Listen on *port* once it is entered. *delay* is in seconds, and that of one way."""
        self.port = port
        self._target = target
        self._delay, self._rate = delay, rate
        #: When the wire is free for the next bytes, each way.
        self._free = {"there": 0.0, "back": 0.0}
        self._is_cut = threading.Event()
        self._is_silent = True
        self._is_listening = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._is_ending = asyncio.Event()
        self._connections: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run, name="forwarder", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._is_listening.wait()
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self._loop.call_soon_threadsafe(self._is_ending.set)
        self._thread.join()

    def cut(self, *, is_silent: bool = True) -> None:
        """Let no byte through from now on; *is_silent*: and tell neither side."""
        self._is_silent = is_silent
        self._is_cut.set()
        if not is_silent:
            asyncio.run_coroutine_threadsafe(self._reset(), self._loop).result()

    def heal(self) -> None:
        """Let new connections through again."""
        if self._is_cut.is_set():
            asyncio.run_coroutine_threadsafe(self._reset(), self._loop).result()
            self._is_cut.clear()
            # What has come in between is held still.
            asyncio.run_coroutine_threadsafe(self._reset(), self._loop).result()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._listen())

    async def _listen(self) -> None:
        wire = socket.create_server((LOOPBACK, self.port))
        if self._rate < float("inf"):  # What has not left the sender is not on the wire.
            wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SMALL_BUFFER)
        server = await asyncio.start_server(self._begin, sock=wire, limit=_SMALL_BUFFER)
        self._is_listening.set()
        await self._is_ending.wait()
        server.close()
        await self._reset()

    async def _reset(self) -> None:
        held = list(self._connections)
        for connection in held:
            connection.cancel()
        await asyncio.gather(*held, return_exceptions=True)

    def _begin(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.get_running_loop().create_task(self._carry(reader, writer))
        self._connections.add(connection)
        connection.add_done_callback(self._connections.discard)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = [writer]
        try:
            if self._is_cut.is_set() and not self._is_silent:
                return
            if self._is_cut.is_set():
                await asyncio.Event().wait()  # until it heals
            with suppress(OSError):
                far_reader, far_writer = await asyncio.open_connection(LOOPBACK, self._target)
                writers.append(far_writer)
                await self._both(self._pass_on(reader, far_writer, "there"), self._pass_on(far_reader, writer, "back"))
        finally:
            for each in writers:
                each.transport.abort()

    async def _both(self, *ways: Coroutine[Any, Any, None]) -> None:
        tasks = [asyncio.ensure_future(way) for way in ways]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: str) -> None:
        loop = asyncio.get_running_loop()
        while data := await reader.read(_CHUNK_BYTES):
            if self._is_cut.is_set():
                await asyncio.Event().wait()  # lost, and with it all that comes after
            if self._rate < float("inf"):
                self._free[way] = max(self._free[way], loop.time()) + len(data) / self._rate
                await asyncio.sleep(self._free[way] - loop.time())
            if self._delay:
                loop.call_later(self._delay, writer.write, data)
                continue
            writer.write(data)
            await writer.drain()
        await asyncio.sleep(self._delay)
        if self._is_cut.is_set():
            await asyncio.Event().wait()  # its end is not heard either
