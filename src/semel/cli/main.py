"""Runs a command, and prints an error as one line. The list of commands is in ``app.py``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

from semel import __version__
from semel.core.text import safe
from semel.errors import ConfigurationError, SemelError

FAILURE = 1
#: Exit status for a wrong command line or set-up. typer uses the same for a wrong option.
USAGE = 2


def main(arguments: Sequence[str] | None = None, program: str = "semel") -> None:
    """Run the command line that this process was started with, or another."""
    typed = list(sys.argv[1:] if arguments is None else arguments)
    if typed in (["--version"], ["version"]):  # The question is how this is installed, perhaps without the extra.
        print(f"semel {__version__}")
        return
    try:
        import rich  # noqa: F401, PLC0415 - needs the extra semel[cli]

        from semel.cli.app import app  # noqa: PLC0415 - as above
        from semel.cli.output import keep_writing  # noqa: PLC0415 - as above
    except ModuleNotFoundError as missing:
        if not is_of(missing, "rich", "typer"):
            raise
        _end("The command line needs typer and rich. Run: pip install 'semel[cli]' (in a checkout: '.[cli]')", USAGE)
    sys.stdout = keep_writing(sys.stdout)
    try:
        app(args=typed, prog_name=program)
    except (ConfigurationError, ImportError) as error:
        _end(error, USAGE)
    except SemelError as error:
        _end(error, FAILURE)
    except Exception as error:
        if sys.flags.dev_mode:
            raise
        _end(f"{type(error).__name__}: {error} (Where: python -X dev -m semel ...)", FAILURE)


def is_of(missing: ModuleNotFoundError, *packages: str) -> bool:
    """Whether the *missing* module belongs to one of *packages*, which an extra installs."""
    return (missing.name or "").partition(".")[0] in packages


def _end(what: object, status: int) -> NoReturn:
    print("semel:", safe(" ".join(str(what).split())), file=sys.stderr)
    sys.exit(status)
