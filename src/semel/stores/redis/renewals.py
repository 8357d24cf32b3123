"""The connection over which the leases of event loops are renewed, from a thread. It is one of those for threads."""

from __future__ import annotations

import threading

from semel.core.commands import Renew
from semel.core.record import Hold
from semel.stores.forks import start_afresh_in_children
from semel.stores.redis.address import Address
from semel.stores.redis.courier import Courier
from semel.stores.redis.keys import Keys
from semel.stores.redis.wires import Wires


class Renewals:
    """One connection to each server that is needed, for one thread at a time."""

    _mutex: threading.Lock
    _is_used: bool

    def __init__(self, address: Address, keys: Keys) -> None:
        """Ask by *keys*, over connections that are opened on first use."""
        self._address = address
        self._keys = keys
        self.start_afresh()
        start_afresh_in_children(self)

    def perform(self, command: Renew) -> frozenset[Hold]:
        """Prolong leases; return the holds that are lost."""
        with self._mutex:
            self._is_used = True
            [outcome] = self._wires.run(self._keys.renew(self._courier, [command]))
        if isinstance(outcome, Exception):
            raise outcome
        lost: frozenset[Hold] = outcome
        return lost

    @property
    def is_used(self) -> bool:
        """Whether there may be a connection to close."""
        return self._is_used

    def close(self) -> None:
        """Disconnect, once a renewal that is under way has ended. Another one connects again."""
        with self._mutex:
            self._is_used = False
            self._wires.close()

    def start_afresh(self) -> None:
        """Have no connection: it is the parent's."""
        self._mutex = threading.Lock()
        self._is_used = False
        self._wires = Wires(self._address)
        self._courier = Courier(self._address)
