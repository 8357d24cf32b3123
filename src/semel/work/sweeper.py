"""The sweeper: frees the keys of workers that died, and parks the operations that may not run again.

A retry takes a dead worker's key over without it. It is here for the keys that nobody retries: so that people are told,
and so that an operation whose outcome is unknown waits for an operator before a client asks.
"""

from __future__ import annotations

from datetime import timedelta

from semel.core.upkeep import MAX_BATCH
from semel.flows.upkeep import SweepReport, sweep
from semel.guard.running import arun, run
from semel.stores import AsyncStore, Store
from semel.work.service import AsyncServicePorts, ServicePorts

#: A third of the usual lease: what is stuck is known soon after, at the price of one look at a small index.
SWEEP_INTERVAL = timedelta(seconds=10)


class Sweeper:
    """Sweeps a store from a thread."""

    name = "sweeper"

    def __init__(self, store: Store, *, interval: timedelta = SWEEP_INTERVAL, has_completer: bool = False) -> None:
        """Sweep *store*. With *has_completer*, operations whose request was kept are left to the completer."""
        self.interval = interval
        self._ports = ServicePorts(store)
        self._has_completer = has_completer

    def run_once(self) -> SweepReport:
        """Sweep all that is stuck now."""
        return run(sweep, self._ports, MAX_BATCH, has_completer=self._has_completer)


class AsyncSweeper:
    """Sweeps a store from an event loop."""

    name = "sweeper"

    def __init__(self, store: AsyncStore, *, interval: timedelta = SWEEP_INTERVAL, has_completer: bool = False) -> None:
        """Sweep *store*. With *has_completer*, operations whose request was kept are left to the completer."""
        self.interval = interval
        self._ports = AsyncServicePorts(store)
        self._has_completer = has_completer

    async def run_once(self) -> SweepReport:
        """Sweep all that is stuck now."""
        return await arun(sweep, self._ports, MAX_BATCH, has_completer=self._has_completer)
