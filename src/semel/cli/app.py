"""The list of commands. What each of them does is in the file of its noun, which is imported when it is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Annotated, Any

import typer
import typer.main
from typer.core import TyperGroup

from semel import __version__
from semel.cli.judging import JudgingCommand

VERSION = "Print the version of Semel."

#: Each command, and where it is: a function, or a Typer of its own.
COMMANDS = {
    "demo": "semel.cli.demo.command:demo",
    "migrate": "semel.cli.schema:migrate",
    "sweep": "semel.cli.work:sweep",
    "reap": "semel.cli.work:reap",
    "work": "semel.cli.work:work",
    "relay": "semel.cli.relay:relay",
    "proxy": "semel.cli.proxy:proxy",
    "console": "semel.cli.console:console",
    "verify": "semel.cli.verify:verify",
    "doctor": "semel.cli.doctor:app",
    "keys": "semel.cli.keys:app",
    "inbox": "semel.cli.inbox:app",
    "journal": "semel.cli.journal:app",
    "outbox": "semel.cli.outbox:app",
    "webhooks": "semel.cli.webhooks:app",
}
#: Those of the functions that have an exit status for a judgement.
JUDGING = frozenset({"verify"})


class _Found(Mapping[str, Any]):
    """Commands by their names. One that is not asked for is not imported: all together take longer than most run."""

    def __init__(self, here: Mapping[str, Any]) -> None:
        self._found = dict(here)

    def __getitem__(self, name: str) -> Any:
        if name not in self._found:
            module, _, attribute = COMMANDS[name].partition(":")
            self._found[name] = _command(name, getattr(import_module(module), attribute))
        return self._found[name]

    def __contains__(self, name: object) -> bool:
        return name in COMMANDS or name in self._found

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*COMMANDS, *self._found]))

    def __len__(self) -> int:
        return len(list(iter(self)))


def _command(name: str, made: Any) -> Any:
    around = typer.Typer(add_completion=False)
    around.callback()(options)  # With it, what is inside keeps its name.
    if isinstance(made, typer.Typer):
        around.add_typer(made, name=name)
    else:
        around.command(name, cls=JudgingCommand if name in JUDGING else None)(made)
    commands: Any = typer.main.get_command(around)
    command = commands.commands[name]
    for each in (command, *getattr(command, "commands", {}).values()):
        _show_flags(each.get_params(typer.Context(each)))
    return command


def _show_flags(params: list[Any]) -> list[Any]:
    """Show no ``<bool>`` behind flags: it would look as if they took a value."""
    for each in params:
        if getattr(each, "is_flag", False):
            each.metavar = ""
    return params


class Commands(TyperGroup):
    """The commands after ``semel``."""

    def __init__(self, **settings: Any) -> None:
        """Have those of `COMMANDS`, too."""
        super().__init__(**settings)
        self.commands: Any = _Found(self.commands)

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the options before a command."""
        return _show_flags(super().get_params(ctx))


app = typer.Typer(
    cls=Commands,
    help="Semel makes HTTP APIs safe to retry. Stores are named by URL, here or in SEMEL_STORE.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # main.py prints one line for an error.
)


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
