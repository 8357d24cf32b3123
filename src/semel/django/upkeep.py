"""Sweeping and reaping once, for ``manage.py`` and for Celery. What the services do is in ``semel/work/``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.core.management.base import CommandError

from semel.core.upkeep import MAX_BATCH
from semel.errors import ConfigurationError, SemelError
from semel.flows.upkeep import ReapReport, SweepReport
from semel.stores import Store
from semel.work import Reaper, Sweeper
from semel.work.plan import duration
from semel.work.service import as_json as spelled

#: The same as in ``semel reap``.
AUDIT_RETENTION = "90d"


def sweep(store: Store) -> SweepReport:
    """Free the keys of workers that died; park the operations that may not run again."""
    return Sweeper(store).run_once()


def reap(store: Store, audit_retention: str = AUDIT_RETENTION, batch: int = MAX_BATCH) -> ReapReport:
    """Clear the records past their retention."""
    if batch < 1:
        raise ConfigurationError("batch must be 1 or more.")
    return Reaper(store, audit_retention=duration(audit_retention), batch=batch).run_once()


def add_json(parser: Any) -> None:
    """Add the option ``--json``."""
    parser.add_argument("--json", action="store_true", dest="as_json", help="Print JSON, for programs.")


def told(run: Callable[[], SweepReport | ReapReport], *, as_json: bool) -> str:
    """Return what to print of one *run*. One that stopped early is printed, and then fails."""
    try:
        report = run()
    except SemelError as error:
        raise CommandError(str(error)) from error
    said = spelled(report) if as_json else str(report)
    if report.error is not None:
        raise CommandError(said) from report.error
    return said
