"""The command ``semel demo`` and its options. What it does is in ``run.py``, which needs the extra semel[demo]."""

from __future__ import annotations

import secrets
import sys
from typing import Annotated

import typer
from rich.console import Console

from semel.cli.address import checked
from semel.cli.main import is_of
from semel.errors import ConfigurationError

SEEDS = 1_000_000


def demo(
    seconds: Annotated[float, typer.Option(min=1, help="How long the storm lasts.")] = 20,
    store: Annotated[
        str | None, typer.Option(metavar="URL", help="Keep the keys here; else in a temporary SQLite file.")
    ] = None,
    unprotected: Annotated[bool, typer.Option("--unprotected", help="The same storm without Semel.")] = False,  # noqa: FBT002 - typer makes an option of it
    seed: Annotated[str | None, typer.Option(help="Repeat the client behaviour and the kills of another run.")] = None,
) -> None:
    """Run payments through retries, races and crashes, and see each of them charged once."""
    if sys.platform == "win32":
        raise ConfigurationError(
            "The demo kills processes and passes sockets on, as Linux and macOS do. Try it in WSL."
        )
    try:
        from semel.cli.demo.run import Plan, run  # noqa: PLC0415 - needs the extra semel[demo]
        from semel.cli.demo.show import Show  # noqa: PLC0415 - as above
    except ModuleNotFoundError as missing:
        if not is_of(missing, "httpx", "uvicorn"):
            raise
        raise ConfigurationError("The demo needs uvicorn and httpx. Run: pip install 'semel[demo]'") from missing
    if store and store.startswith("memory:"):
        raise ConfigurationError("The demo kills its API, and a store in memory would die with it. Give another.")
    plan = Plan(seconds, seed or str(secrets.randbelow(SEEDS)), checked(store) if store else None, not unprotected)
    verdict = run(plan, Show(Console(highlight=False)))
    if plan.is_protected and not verdict.is_good:
        raise typer.Exit(1)
