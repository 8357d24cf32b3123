"""Notices that a client which is kept waiting has disconnected. Messages that it reads are kept for the app."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from semel.asgi.protocol import Message, Receive


class Disconnect:
    """A server's ``receive``, which can be watched while the app does not receive. The whole body has been read."""

    def __init__(self, receive: Receive) -> None:
        """Nothing is watched yet."""
        self._receive = receive
        #: Servers differ in what becomes of a call that is cancelled, so the one that listens is kept for the app.
        self._ear: asyncio.Task[Message] | None = None
        self._has_hung_up = False

    def listen(self, on_gone: Callable[[], None]) -> None:
        """Call *on_gone* when the client hangs up."""
        if self._ear is None and not self._has_hung_up:
            self._ear = asyncio.get_running_loop().create_task(self._hear(on_gone))
        elif self._has_hung_up:
            on_gone()

    async def __call__(self) -> Message:
        """Return the server's next message."""
        if self._has_hung_up:
            return {"type": "http.disconnect"}
        if self._ear is None:
            return await self._receive()
        # The task that is cancelled here may not be the one that watches.
        return await asyncio.shield(self._ear)

    def close(self) -> None:
        """Listen no longer."""
        ear, self._ear = self._ear, None
        if ear is not None and not ear.cancel() and not ear.cancelled():
            ear.exception()  # Seen: a server that broke tells the task that serves the request, too.

    async def _hear(self, on_gone: Callable[[], None]) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":  # Nothing of the body is left, and some servers say so twice.
            message = await self._receive()
        if message["type"] == "http.request":
            # A middleware in front has read the body, and repeats it as often as it is asked for. It will never
            # say anything else, and a loop that asked on and on would block all other tasks.
            return message
        self._has_hung_up = True
        on_gone()
        return message
