"""The reaper: clears away what is past retention. It touches nothing that is in flight, and nothing that is parked."""

from __future__ import annotations

from datetime import timedelta

from semel.core.events import Reaped
from semel.core.upkeep import MAX_BATCH
from semel.flows.ports import Ports
from semel.flows.upkeep import AUDIT_RETENTION, ReapReport, reap
from semel.stores import AsyncStore
from semel.telemetry.stream import count, sinks
from semel.work.service import S_co, StoreService

#: Often enough that a run finds a minute's worth of records, and not a day's.
REAP_INTERVAL = timedelta(seconds=60)


class Reaper(StoreService[S_co, ReapReport]):
    """Reaps a store."""

    name = "reaper"

    def __init__(
        self,
        store: S_co,
        *,
        interval: timedelta = REAP_INTERVAL,
        audit_retention: timedelta | None = AUDIT_RETENTION,
        batch: int = MAX_BATCH,
    ) -> None:
        """Reap *store*, at most *batch* records in one statement. *audit_retention* None keeps the trail for ever."""
        super().__init__(store, interval)
        self._audit_retention = audit_retention
        self._largest = self._batch = batch

    async def flow(self, ports: Ports) -> ReapReport:
        """Reap all that is past retention now."""
        report = await reap(ports, self._batch, self._audit_retention, largest=self._largest)
        self._batch = report.batch
        if sinks():
            count(Reaped(report.deleted, report.stripped, report.abandoned))
        return report


class AsyncReaper(Reaper[AsyncStore]):
    """The same, of a store for an event loop."""
