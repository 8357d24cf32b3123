"""The list of commands. What each of them does is in the file of its noun."""

from __future__ import annotations

from typing import Annotated

import typer

from semel import __version__
from semel.cli import console, doctor, inbox, journal, keys, outbox, proxy, relay, schema, verify, webhooks, work
from semel.cli.demo import command as demo
from semel.cli.judging import JudgingCommand

VERSION = "Print the version of Semel."

app = typer.Typer(
    help="Semel makes HTTP APIs safe to retry. Stores are named by URL, here or in SEMEL_STORE.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # main.py prints one line for an error.
)

app.command("demo")(demo.demo)
app.command("migrate")(schema.migrate)
app.command("sweep")(work.sweep)
app.command("reap")(work.reap)
app.command("work")(work.work)
app.command("relay")(relay.relay)
app.command("proxy")(proxy.proxy)
app.command("console")(console.console)
app.command("verify", cls=JudgingCommand)(verify.verify)
app.add_typer(doctor.app, name="doctor")
app.add_typer(keys.app, name="keys")
app.add_typer(inbox.app, name="inbox")
app.add_typer(journal.app, name="journal")
app.add_typer(outbox.app, name="outbox")
app.add_typer(webhooks.app, name="webhooks")


@app.command()
def version() -> None:
    """Print the version of Semel."""
    print(f"semel {__version__}")


def _version(*, is_asked: bool) -> None:
    if is_asked:
        version()
        raise typer.Exit


@app.callback()
def options(
    *,
    _is_asked: Annotated[
        bool, typer.Option("--version", callback=lambda given: _version(is_asked=given), is_eager=True, help=VERSION)
    ] = False,
) -> None:
    """Take the options before a command."""
