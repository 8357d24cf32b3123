"""Sweeping, reaping and erasing once, for ``manage.py`` and for Celery. What the services do is in ``semel/work/``."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from django.core.management.base import CommandError

from semel.core.upkeep import MAX_BATCH
from semel.errors import ConfigurationError, SemelError
from semel.flows.erase import EraseReport
from semel.flows.erase import erase as erase_flow
from semel.flows.upkeep import ReapReport, SweepReport
from semel.guard.running import run as run_flow
from semel.stores import Store
from semel.stores.base import this_user
from semel.work import Reaper, Sweeper
from semel.work.plan import duration
from semel.work.service import ServicePorts, facts_of

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


def erase(store: Store, scope: str, *, is_preview: bool = False, reason: str | None = None) -> EraseReport:
    """Erase what the store has of *scope*, in the name of this terminal's user; or only count it."""
    before, store.actor = store.actor, this_user()
    try:
        report = run_flow(erase_flow, ServicePorts(store), scope, is_preview=is_preview, reason=reason)
    except SemelError as error:
        raise CommandError(str(error)) from error
    finally:
        store.actor = before
    return report


def add_json(parser: Any) -> None:
    """Add the option ``--json``."""
    parser.add_argument("--json", action="store_true", dest="as_json", help="Print JSON, for programs.")


def told(run: Callable[[], SweepReport | ReapReport], *, as_json: bool) -> str:
    """Return what to print of one *run*. One that stopped early is printed, and then fails."""
    try:
        report = run()
    except SemelError as error:
        raise CommandError(str(error)) from error
    said = json.dumps(facts_of(report)) if as_json else str(report)
    if report.error is not None:
        raise CommandError(said) from report.error
    return said
