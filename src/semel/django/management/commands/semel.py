"""``manage.py semel``. What it runs is in ``semel/cli``."""

from __future__ import annotations

from argparse import REMAINDER
from importlib import import_module
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser


class Command(BaseCommand):  # type: ignore[misc]  # Django has no types
    """Runs a command of ``semel``."""

    help = "Look at the keys of this project, resolve and free them, examine it all, and what else semel --help has."
    #: Whatever is wrong, what is stuck can be seen.
    requires_system_checks = ()

    def add_arguments(self, parser: CommandParser) -> None:
        """Take everything."""
        parser.add_argument("arguments", nargs=REMAINDER, metavar="COMMAND", help="As of semel: keys list")

    def handle(self, *, arguments: list[str], **_: Any) -> None:
        """Run it."""
        # It is above this package, and Django looks for its commands here.
        try:
            project = import_module("semel.cli.project")
        except ModuleNotFoundError as missing:
            if missing.name not in {"rich", "typer"}:
                raise
            raise CommandError("manage.py semel needs typer and rich. Run: pip install 'semel[cli]'") from None
        project.run(arguments)
