"""What commands have in common that judge something: their exit statuses. What they judge is in ``verify.py`` and
``doctor.py``.
"""

from __future__ import annotations

import sys
from typing import Any, NoReturn

import typer
from typer.core import TyperCommand

from semel.cli.output import safe

#: 2 means that something can't be told, so a wrong command line is 3.
USAGE = 3


class JudgingCommand(TyperCommand):
    """A command with another exit status for a wrong command line."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """Read the command line."""
        try:
            return super().make_context(*args, **kwargs)
        except Exception as error:
            if hasattr(error, "exit_code") and hasattr(error, "format_message"):
                error.exit_code = USAGE
            raise


def end(error: Exception) -> NoReturn:
    """Say in one line what was wrong with the command line, and end with its status."""
    print("semel:", safe(" ".join(str(error).split())), file=sys.stderr)
    raise typer.Exit(USAGE) from None
