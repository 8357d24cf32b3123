"""How a list is printed: as a table, as JSON, once or again and again. What is in it, the command of its noun reads."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from semel.cli.output import has_reader, put, safe
from semel.errors import StoreUnavailable

#: How long a list stands before it is read again. An operator looks at it; a store hardly notices.
SECONDS_BETWEEN = 2.0

WatchOption = Annotated[
    bool, typer.Option("--watch", help=f"Look again every {SECONDS_BETWEEN:g} seconds, until Ctrl-C.")
]


@dataclass(frozen=True, slots=True)
class Listing:
    """What a list shows."""

    #: A line each, under stable names, for programs.
    facts: Sequence[dict[str, Any]]
    #: The same for people; None if there is nothing.
    table: Table | None
    #: What is said in place of an empty table.
    nothing: str


def show_list(read: Callable[[], Listing], *, as_json: bool, watch: bool) -> None:
    """Print what *read* finds. If it is watched: anew on a terminal, one list after another elsewhere."""
    if not watch:
        _print(read(), as_json=as_json)
        return
    try:
        if as_json:
            _repeat(read, lambda found: print(json.dumps(found.facts), flush=True))
        elif not sys.stdout.isatty():
            _repeat(read, lambda found: _print(found, as_json=False, end="\n"))
        else:
            _watch(read)
    except KeyboardInterrupt:
        pass  # the way to end it


def _print(found: Listing, *, as_json: bool, end: str = "") -> None:
    if as_json:
        print(json.dumps(found.facts, indent=2))
    elif found.table is None:
        print(found.nothing, end=f"\n{end}", flush=True)
    else:
        put(found.table)
        print(end=end, flush=True)


def _repeat(read: Callable[[], Listing], tell: Callable[[Listing], None]) -> None:
    while has_reader():
        try:
            found = read()
        except StoreUnavailable as error:
            print(_trouble(error), file=sys.stderr, flush=True)
        else:
            tell(found)
        time.sleep(SECONDS_BETWEEN)


def _watch(read: Callable[[], Listing]) -> None:
    console = Console(highlight=False)
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            said = Text(f"{time.strftime('%H:%M:%S')}  every {SECONDS_BETWEEN:g} s, Ctrl-C ends it", "dim")
            try:
                found = read()
                live.update(Group(said, Text(), found.table or Text(found.nothing)), refresh=True)
            except StoreUnavailable as error:
                # A fail-over is when a person looks: the list goes on when the store does.
                live.update(Group(said, Text(), Text(_trouble(error), "bold red")), refresh=True)
            time.sleep(SECONDS_BETWEEN)


def _trouble(error: StoreUnavailable) -> str:
    return safe(f"The store can't be read now: {' '.join(str(error).split())}")
