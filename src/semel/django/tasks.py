"""Sweeping and reaping as Celery tasks. Celery's autodiscovery finds this file by its name; nothing else imports it.

app.conf.beat_schedule = {
    "semel-sweep": {"task": "semel.sweep", "schedule": 10},
    "semel-reap": {"task": "semel.reap", "schedule": 60},
}
"""

from __future__ import annotations

from semel.core.upkeep import MAX_BATCH
from semel.django import conf, upkeep
from semel.flows.upkeep import ReapReport, SweepReport

try:
    from celery import shared_task
except ImportError as error:  # pragma: no cover - seen only where it is missing
    raise ImportError("semel.django.tasks is for Celery. Run: pip install celery") from error


@shared_task(name="semel.sweep", ignore_result=True)  # type: ignore[untyped-decorator]  # Celery has no types
def sweep() -> str:
    """Free the keys of workers that died; park the operations that may not run again."""
    return _told(upkeep.sweep(conf.store()))


@shared_task(name="semel.reap", ignore_result=True)  # type: ignore[untyped-decorator]  # as above
def reap(audit_retention: str = upkeep.AUDIT_RETENTION, batch: int = MAX_BATCH) -> str:
    """Clear the records past their retention."""
    return _told(upkeep.reap(conf.store(), audit_retention, batch))


def _told(report: SweepReport | ReapReport) -> str:
    if report.error is not None:
        raise report.error
    return str(report)
