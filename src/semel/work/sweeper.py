"""The sweeper: frees the keys of workers that died, and parks the operations that may not run again.

A retry takes a dead worker's key over without it. It is here for the keys that are never retried: people are told, and
an operation with an unknown outcome waits for an operator before a client asks.
"""

from __future__ import annotations

from datetime import timedelta

from semel.core.commands import Now
from semel.core.upkeep import MAX_BATCH
from semel.errors import StoreError
from semel.flows.ports import Ports
from semel.flows.upkeep import SweepReport, sweep
from semel.stores import AsyncStore
from semel.work.service import S_co, StoreService

#: A third of the usual lease: what is stuck is known soon after, at the price of one look at a small index.
SWEEP_INTERVAL = timedelta(seconds=10)


class Sweeper(StoreService[S_co, SweepReport]):
    """Sweeps a store."""

    name = "sweeper"
    #: Since the last run.
    _store_was_away = False

    def __init__(self, store: S_co, *, interval: timedelta = SWEEP_INTERVAL, has_completer: bool = False) -> None:
        """Sweep *store*. With *has_completer*, operations with a stored request are left to the completer."""
        super().__init__(store, interval)
        self._has_completer = has_completer

    async def flow(self, ports: Ports) -> SweepReport:
        """Sweep all that is stuck now. The first run after the store was away leaves that to the next: leases ran out
        meanwhile, and workers that live renew them first.
        """
        if self._store_was_away:
            try:
                await ports.ask(Now())
            except StoreError as error:
                return SweepReport(error=error)
            self._store_was_away = False
            return SweepReport()
        report = await sweep(ports, MAX_BATCH, has_completer=self._has_completer)
        self._store_was_away = report.error is not None
        return report


class AsyncSweeper(Sweeper[AsyncStore]):
    """The same, of a store for an event loop."""
