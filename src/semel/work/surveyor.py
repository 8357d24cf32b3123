"""The surveyor: counts what is in the store, for gauges. It changes nothing, and runs in ``semel work --metrics``
alone: one process counts for all.
"""

from __future__ import annotations

from datetime import timedelta

from semel.flows.ports import Ports
from semel.flows.upkeep import SurveyReport, survey
from semel.stores import AsyncStore
from semel.telemetry.stream import count
from semel.work.service import S_co, StoreService

#: As often as Prometheus scrapes by default, or a little more.
SURVEY_INTERVAL = timedelta(seconds=15)


class Surveyor(StoreService[S_co, SurveyReport]):
    """Counts what is in a store."""

    name = "surveyor"

    def __init__(self, store: S_co, *, interval: timedelta = SURVEY_INTERVAL) -> None:
        """Look at *store* every *interval*."""
        super().__init__(store, interval)

    async def flow(self, ports: Ports) -> SurveyReport:
        """Count, and tell the sinks."""
        report = await survey(ports)
        if report.survey is not None:
            count(report.survey)
        return report


class AsyncSurveyor(Surveyor[AsyncStore]):
    """The same, of a store for an event loop."""
