"""The Redis store for threads. What it says to the server is in ``keys.py``, ``others.py`` and ``upkeep.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from semel.core.commands import Claim, Command, Complete, Renew
from semel.stores.base import Store
from semel.stores.forks import start_afresh_in_children
from semel.stores.lane import Lane
from semel.stores.redis.address import Address
from semel.stores.redis.courier import Courier, Talk
from semel.stores.redis.keys import Keys
from semel.stores.redis.listening import Listener
from semel.stores.redis.others import OTHERS, others
from semel.stores.redis.upkeep import UPKEEP, Upkeep
from semel.stores.redis.wires import Wires

T = TypeVar("T")


class RedisStore(Store):
    """Records in Redis. Claims, answers, leases and upkeep have a connection each."""

    def __init__(self, url: str) -> None:
        """Use the server that *url* names. Connects on first use."""
        self.address = Address.of(url)
        self.notes_replays = self.address.audit == "replays"
        self.start_afresh()
        start_afresh_in_children(self)

    def perform(self, command: Command[T]) -> T:
        """Carry out one store command."""
        return cast("T", self._lanes[type(command)].submit(command))

    def listen(self, on_end: Callable[[str], None]) -> None:
        """Subscribe to hints, once for all who listen."""
        self._listener.add(on_end)

    def open(self) -> None:
        """Connect, and see whether the server, or every one of them, can serve."""
        # Not over a lane's own connection: its batch may be under way.
        wires, courier = Wires(self.address), Courier(self.address)
        try:
            wires.run(courier.check())
        finally:
            wires.close()

    def migrate(self) -> list[str]:
        """There is no schema."""
        return []

    def close(self) -> None:
        """Disconnect."""
        self._listener.close()
        errands = self._keys.index.rest()
        if errands:
            wires, courier = Wires(self.address), Courier(self.address)
            wires.run(courier.deliver([errand.call for errand in errands]))
            wires.close()
        for wires in self._wires:
            wires.close()

    def start_afresh(self) -> None:
        """Have no connection, and no operation under way."""
        self._keys = Keys(self.address, lambda: self.actor)
        self._listener = Listener(self.address, self._keys.channel)
        self._wires: list[Wires] = []
        keys = self._keys
        other = self._lane(lambda courier, batch: others(keys, courier, batch))
        # These take their time, and no request waits for them.
        upkeep = self._lane(Upkeep(keys).each)
        self._lanes: dict[type[Command[Any]], Lane[Any]] = {
            Claim: self._lane(keys.claim),
            Complete: self._lane(keys.complete),
            Renew: self._lane(keys.renew),
            **dict.fromkeys(OTHERS, other),
            **dict.fromkeys(UPKEEP, upkeep),
        }

    def _lane(self, talk: Callable[[Courier, list[Any]], Talk[list[Any]]]) -> Lane[Any]:
        wires, courier = Wires(self.address), Courier(self.address)
        self._wires.append(wires)
        return Lane(lambda batch: wires.run(talk(courier, batch)))
