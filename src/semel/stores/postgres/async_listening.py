"""Hints for an event loop: hears on a connection of its own, through asyncpg, which operations end in other processes.

Nothing depends on it, as in ``listening.py``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from semel.stores.forks import leave_alone, start_afresh_in_children
from semel.stores.postgres.address import CONNECT_SECONDS, Address
from semel.stores.postgres.async_opening import PsycopgSession, as_given
from semel.stores.postgres.pooler import is_direct_async
from semel.stores.postgres.signals import channel_of
from semel.stores.postgres.standing import APPLICATION_NAME, HEARTBEAT, HEARTBEAT_SECONDS, SETTLE, pauses

try:
    import asyncpg
except ImportError as error:  # pragma: no cover - seen only where the extra is missing
    raise ImportError("PostgreSQL under an event loop needs asyncpg. Run: pip install 'semel[postgres]'") from error

_logger = logging.getLogger("semel")

OnEnd = Callable[[str], None]

#: A loop that is about to end waits for this, so it is short.
LEAVE_SECONDS = 1


class AsyncListener:
    """Listens from the first who wants to hear until it is closed, on one event loop."""

    def __init__(self, address: Address) -> None:
        """Listen to what is said of the table at *address*. Nothing is connected yet."""
        self._address = address
        self._wanted_by: tuple[OnEnd, ...] = ()
        self._task: asyncio.Task[None] | None = None
        start_afresh_in_children(self)

    def add(self, on_end: OnEnd) -> None:
        """Call *on_end*, on the running loop, with all that is said from now on."""
        if on_end not in self._wanted_by:
            self._wanted_by += (on_end,)
        if self._task is None:
            self._task = asyncio.create_task(self._listen(), name="semel-listener")

    async def close(self) -> None:
        """Stop listening."""
        task, self._task, self._wanted_by = self._task, None, ()
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    def drop(self) -> None:
        """Give it up at once: its loop is gone, or will be."""
        task, self._task, self._wanted_by = self._task, None, ()
        if task is not None:
            with suppress(RuntimeError):  # the loop that it was started on may be closed
                task.cancel()

    def start_afresh(self) -> None:
        """Hear nothing: who listens are the parent's."""
        leave_alone(self._task)
        self._task, self._wanted_by = None, ()

    async def _listen(self) -> None:
        waits = pauses()
        while True:
            heard = asyncio.Event()
            try:
                if not await self._listen_once(heard):
                    _logger.debug("%s is a pooler, which passes no hints on; waiters poll.", self._address)
                    return
            except Exception as error:  # noqa: BLE001 - whatever it was, it is tried again
                _logger.debug("Hints of %s can't be heard for now; waiters poll: %s", self._address, error)
            if heard.is_set():
                waits = pauses()
            await asyncio.sleep(next(waits))

    async def _listen_once(self, heard: asyncio.Event) -> bool:
        """Listen until the connection is lost; False: there is a pooler in between."""
        connection = await (self._opened() if self._address.opener is None else as_given(self._address))
        channel = channel_of(self._address.names)
        try:
            if not await is_direct_async(connection):
                return False
            await connection.execute(SETTLE, timeout=CONNECT_SECONDS)
            if isinstance(connection, PsycopgSession):
                await connection.hear(channel, self._tell, heard)
            lost = asyncio.Event()
            connection.add_termination_listener(lambda _connection: lost.set())
            await connection.add_listener(channel, self._hear)
            heard.set()
            while not lost.is_set():
                try:
                    async with asyncio.timeout(HEARTBEAT_SECONDS):
                        await lost.wait()
                except TimeoutError:
                    # Outside of the time limit, and it finds out what a kernel does not say.
                    await connection.execute(HEARTBEAT, timeout=CONNECT_SECONDS)
            return True
        finally:
            await _leave(connection)

    async def _opened(self) -> Any:
        return await asyncpg.connect(
            self._address.url,
            timeout=CONNECT_SECONDS,
            command_timeout=CONNECT_SECONDS,
            statement_cache_size=0,
            server_settings={"application_name": APPLICATION_NAME},
        )

    def _hear(self, _connection: object, _pid: int, _channel: str, payload: object) -> None:
        self._tell(str(payload))

    def _tell(self, payload: str) -> None:
        for on_end in self._wanted_by:
            on_end(payload)


async def _leave(connection: Any) -> None:
    try:
        await connection.close(timeout=LEAVE_SECONDS)
    except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError):
        connection.terminate()
