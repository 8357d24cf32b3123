"""The reaper: clears away what is past retention. It touches nothing that is in flight, and nothing that is parked."""

from __future__ import annotations

import logging
from datetime import timedelta

from semel.core.events import Reaped
from semel.core.upkeep import MAX_BATCH
from semel.flows.ports import Ports
from semel.flows.upkeep import AUDIT_RETENTION, ReapReport, reap, rotate
from semel.stores import AsyncStore
from semel.stores.dialect import POSTGRESQL, durable_of
from semel.telemetry.stream import count, sinks
from semel.work.service import S_co, StoreService

#: Often enough that a run finds a minute's worth of records, and not a day's.
REAP_INTERVAL = timedelta(seconds=60)

_logger = logging.getLogger("semel")


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
        dialect = durable_of(store).dialect
        self._may_have_partitions = dialect is not None and dialect.name == POSTGRESQL
        #: What the log has of partitions that can't be made or dropped: once, not with every run.
        self._told: str | None = None

    async def flow(self, ports: Ports) -> ReapReport:
        """Reap all that is past retention now."""
        report = await reap(ports, self._batch, self._audit_retention, largest=self._largest)
        self._batch = report.batch
        if self._may_have_partitions:
            report = await rotate(ports, report)
            if report.trouble != self._told and report.error is None:
                self._told = report.trouble
                if report.trouble is not None:
                    _logger.warning("Large answers: %s.", report.trouble)
        if sinks():
            count(Reaped(report.deleted, report.stripped, report.abandoned))
        return report


class AsyncReaper(Reaper[AsyncStore]):
    """The same, of a store for an event loop."""
