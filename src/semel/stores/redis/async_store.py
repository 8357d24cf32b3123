"""The Redis store for an event loop. What it says to the server is in ``keys.py``, ``others.py`` and ``upkeep.py``."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from semel.core.commands import Claim, Command, Complete, Renew
from semel.core.record import Hold
from semel.stores.base import AsyncStore
from semel.stores.lane import AsyncLane
from semel.stores.redis.address import Address
from semel.stores.redis.async_wires import AsyncWires
from semel.stores.redis.courier import Courier, Talk
from semel.stores.redis.keys import Keys
from semel.stores.redis.listening import AsyncListener
from semel.stores.redis.others import OTHERS, others
from semel.stores.redis.renewals import Renewals
from semel.stores.redis.upkeep import UPKEEP, Upkeep
from semel.stores.step import Step

T = TypeVar("T")


class AsyncRedisStore(AsyncStore):
    """Records in Redis. Claims, answers, leases and upkeep have a connection each."""

    def __init__(self, url: str) -> None:
        """Use the server that *url* names. Connects on first use."""
        self.address = Address.of(url)
        self.notes_replays = self.address.audit == "replays"
        self._keys = Keys(self.address, lambda: self.actor)
        self._upkeep = Upkeep(self._keys)
        self._renewals = Renewals(self.address, self._keys)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lines: list[_Line] = []
        self._listener = AsyncListener(self.address, self._keys.channel)
        self._bind()

    def perform(self, command: Command[T]) -> Step[T]:
        """Start one store command."""
        if asyncio.get_running_loop() is not self._loop:
            self._bind()
        return self._lanes[type(command)].submit(command)

    def renew(self, command: Renew) -> frozenset[Hold]:
        """Prolong leases, from any thread, over a connection of threads."""
        return self._renewals.perform(command)

    def listen(self, on_end: Callable[[str], None]) -> None:
        """Subscribe to hints, once for all who listen."""
        self._listener.add(on_end)

    async def open(self) -> None:
        """Connect, and see whether the server, or every one of them, can serve."""
        if asyncio.get_running_loop() is not self._loop:
            self._bind()
        # Not over a lane's own connection: its batch may be under way.
        line = _Line(self.address)
        try:
            await line.run(line.courier.check())
        finally:
            line.wires.drop()

    async def close(self) -> None:
        """Finish what is under way and disconnect."""
        await self._listener.close()
        if self._renewals.is_used:
            await asyncio.to_thread(self._renewals.close)
        if asyncio.get_running_loop() is not self._loop:
            return
        for lane in set(self._lanes.values()):
            await lane.idle()
        last = self._lines[-1]
        await last.run(last.courier.deliver([errand.call for errand in self._keys.index.rest()]))
        for line in self._lines:
            line.wires.drop()

    def _bind(self) -> None:
        """Start afresh on the running loop: a connection belongs to the loop that made it."""
        try:
            self._loop = asyncio.get_running_loop()
        except RuntimeError:
            self._loop = None
        for line in self._lines:
            line.wires.drop()
        self._lines = []
        keys = self._keys
        other = self._lane(lambda courier, batch: others(keys, courier, batch))
        # These take their time, and no request waits for them.
        upkeep = self._lane(self._upkeep.each)
        self._lanes: dict[type[Command[Any]], AsyncLane[Any]] = {
            Claim: self._lane(keys.claim),
            Complete: self._lane(keys.complete),
            Renew: self._lane(keys.renew),
            **dict.fromkeys(OTHERS, other),
            **dict.fromkeys(UPKEEP, upkeep),
        }

    def _lane(self, talk: Callable[[Courier, list[Any]], Talk[list[Any]]]) -> AsyncLane[Any]:
        line = _Line(self.address)
        self._lines.append(line)
        return AsyncLane(lambda batch: line.run(talk(line.courier, batch)))


class _Line:
    """What one lane has of its own: connections, and a courier that knows the way."""

    def __init__(self, address: Address) -> None:
        self.courier = Courier(address)
        self.wires = AsyncWires(address)

    def run(self, talk: Talk[T]) -> Awaitable[T]:
        return self.wires.run(talk)
