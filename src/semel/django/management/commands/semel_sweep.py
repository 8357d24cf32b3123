"""``manage.py semel_sweep``. What the sweeper does is in ``semel/work/sweeper.py``."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandParser

from semel.django import conf, upkeep


class Command(BaseCommand):  # type: ignore[misc]  # Django has no types
    """Sweeps once."""

    help = "Free the keys of workers that died, once; park the operations that may not run again."

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the options."""
        upkeep.add_json(parser)

    def handle(self, *, as_json: bool, **_: Any) -> str:
        """Sweep, and say what was done."""
        return upkeep.told(lambda: upkeep.sweep(conf.store()), as_json=as_json)
