"""The counter: adds how the requests of this process have ended to the store's counts by minute. It counts nothing
itself, and no request waits for it.

A process that dies loses what it has counted since the last time. A store that can't be written, or has no table for
it, has no counts: that is logged once, and changes nothing else.
"""

from __future__ import annotations

from datetime import timedelta

from semel.flows.ports import Ports
from semel.flows.upkeep import CountReport, add_counts
from semel.work.service import S_co, StoreService

#: The console draws minutes; a lost process loses as much.
COUNT_INTERVAL = timedelta(seconds=20)


class EndingsCounter(StoreService[S_co, CountReport]):
    """Adds to the counts of a store."""

    name = "counter"

    def __init__(self, store: S_co, *, interval: timedelta = COUNT_INTERVAL) -> None:
        """Add to the counts of *store* every *interval*."""
        super().__init__(store, interval)
        self._is_told = self._has_failed = False

    async def flow(self, ports: Ports) -> CountReport:
        """Add what was counted."""
        report = await add_counts(ports, self._store.ended)
        self._has_failed = report.error is not None
        if report.error is None or self._is_told:
            return CountReport(report.requests)
        self._is_told = True
        return report

    async def let_go(self) -> None:
        """Add what was counted since the last time, before the process ends; not to a store that keeps it waiting."""
        if not self._has_failed:
            await add_counts(self, self._store.ended)
