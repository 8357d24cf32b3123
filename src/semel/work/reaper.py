"""The reaper: clears away what is past retention. It touches nothing that is in flight, and nothing that is parked."""

from __future__ import annotations

from datetime import timedelta

from semel.core.upkeep import MAX_BATCH
from semel.flows.upkeep import AUDIT_RETENTION, ReapReport, reap
from semel.guard.running import arun, run
from semel.stores import AsyncStore, Store
from semel.work.service import AsyncServicePorts, ServicePorts

#: Often enough that a run finds a minute's worth of records, and not a day's.
REAP_INTERVAL = timedelta(seconds=60)


class Reaper:
    """Reaps a store from a thread."""

    name = "reaper"

    def __init__(
        self,
        store: Store,
        *,
        interval: timedelta = REAP_INTERVAL,
        audit_retention: timedelta | None = AUDIT_RETENTION,
        batch: int = MAX_BATCH,
    ) -> None:
        """Reap *store*, at most *batch* records in one statement. *audit_retention* None keeps the trail for ever."""
        self.interval = interval
        self._ports = ServicePorts(store)
        self._audit_retention = audit_retention
        self._largest = self._batch = batch

    def run_once(self) -> ReapReport:
        """Reap all that is past retention now."""
        report = run(reap, self._ports, self._batch, self._audit_retention, largest=self._largest)
        self._batch = report.batch
        return report


class AsyncReaper:
    """Reaps a store from an event loop."""

    name = "reaper"

    def __init__(
        self,
        store: AsyncStore,
        *,
        interval: timedelta = REAP_INTERVAL,
        audit_retention: timedelta | None = AUDIT_RETENTION,
        batch: int = MAX_BATCH,
    ) -> None:
        """Reap *store*, at most *batch* records in one statement. *audit_retention* None keeps the trail for ever."""
        self.interval = interval
        self._ports = AsyncServicePorts(store)
        self._audit_retention = audit_retention
        self._largest = self._batch = batch

    async def run_once(self) -> ReapReport:
        """Reap all that is past retention now."""
        report = await arun(reap, self._ports, self._batch, self._audit_retention, largest=self._largest)
        self._batch = report.batch
        return report
