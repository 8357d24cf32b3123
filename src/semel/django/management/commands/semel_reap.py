"""``manage.py semel_reap``. What the reaper does is in ``semel/work/reaper.py``."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandParser

from semel.core.upkeep import MAX_BATCH
from semel.django import conf, upkeep


class Command(BaseCommand):  # type: ignore[misc]  # Django has no types
    """Reaps once."""

    help = "Clear the records past their retention, once. Records in progress and parked ones stay."

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the options."""
        parser.add_argument(
            "--audit-retention",
            metavar="TIME",
            default=upkeep.AUDIT_RETENTION,
            help="How long the audit trail is kept: 90d, 12h.",
        )
        parser.add_argument(
            "--batch",
            type=int,
            default=MAX_BATCH,
            help="How many records one statement clears at most.",
        )
        upkeep.add_json(parser)

    def handle(self, *, audit_retention: str, batch: int, as_json: bool, **_: Any) -> str:
        """Reap, and say what was done."""
        return upkeep.told(lambda: upkeep.reap(conf.store(), audit_retention, batch), as_json=as_json)
