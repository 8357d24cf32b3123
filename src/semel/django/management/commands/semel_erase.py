"""``manage.py semel_erase``. What is erased is in ``semel/core/commands/erasing.py``."""

from __future__ import annotations

import json
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from semel.core.operator import erasing_means, left_lines
from semel.django import conf, upkeep

NOT_FOUND = (
    "The scope of a user who logs in with Django is user:PRIMARY-KEY, such as user:7; else it is what SEMEL['SCOPE'] "
    "returns. semel keys list shows them: python manage.py semel keys list"
)


class Command(BaseCommand):  # type: ignore[misc]  # Django has no types
    """Erases one customer's data."""

    help = (
        "Erase a customer's data. Tombstones of what has ended stay until their retention ends: a retry does not run."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the options."""
        parser.add_argument("scope", metavar="SCOPE", help="The customer, as the scope of the guard names it.")
        parser.add_argument("--reason", metavar="TEXT", help="For the audit trail. Do not name the customer in it.")
        parser.add_argument("--yes", action="store_true", help="Do not ask for confirmation.")
        upkeep.add_json(parser)

    def handle(self, *, scope: str, reason: str | None, yes: bool, as_json: bool, **_: Any) -> str:
        """Show what will be erased, ask, erase it, and say what was done."""
        if as_json and not yes:
            raise CommandError("Say --yes with --json: a program can't answer the question.")
        store = conf.store()
        if not yes:
            seen = upkeep.erase(store, scope, is_preview=True)
            self.stdout.write("\n".join([*erasing_means(seen.erased, seen.audit_lines), *left_lines(seen.left)]))
            if seen.is_idle:
                raise CommandError(NOT_FOUND)
            try:
                answer = input("Erase this? [y/N]: ")
            except EOFError:
                raise CommandError("Nothing was erased. Without a terminal, say --yes.") from None
            if answer.strip().lower() not in {"y", "yes"}:
                raise CommandError("Nothing was erased.")
        done = upkeep.erase(store, scope, reason=reason)
        said = json.dumps(done.facts) if as_json else str(done)
        if done.error is not None or done.left:
            raise CommandError(said)
        return said
