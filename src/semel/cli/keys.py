"""``semel keys``: looks at what a store holds. What operators may change is in ``resolving.py``.

Keys, answers and the results of steps may hold personal data.
"""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.text import Text

from semel.cli import resolving
from semel.cli.address import StoreOption, opened
from semel.cli.finding import KeyArgument, KeyNotFound, ScopeOption, find, missing
from semel.cli.output import JsonOption, put, safe
from semel.cli.showing import (
    all_facts_of,
    facts_of,
    print_body,
    record_lines,
    sheet_of,
    table_of,
    trail_facts,
    trail_lines,
)
from semel.core.commands import Browse, ReadTrail
from semel.core.record import Entry
from semel.core.state import State

#: That are listed beside the newest keys: more than a person will resolve by hand.
MAX_PARKED = 1000

app = typer.Typer(help="Look at the keys of a store, and free or resolve one.", no_args_is_help=True)


@app.command("list")
def list_keys(
    store: StoreOption = None,
    state: Annotated[State | None, typer.Option(help="Only those in this state; unknown are to be resolved.")] = None,
    scope: Annotated[str | None, typer.Option(help="Only those of this owner.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="How many, the newest first.")] = 20,
    as_json: JsonOption = False,  # noqa: FBT002 - typer makes an option of it
) -> None:
    """List the newest keys, and after them those older ones that are to be resolved."""
    with opened(store) as keys:
        records = keys.perform(Browse(limit=limit, scope=scope, state=state))
        if state is None:
            # They wait for the one who reads this, however old they are.
            parked = keys.perform(Browse(limit=MAX_PARKED, scope=scope, state=State.UNKNOWN))
            listed = {(record.scope, record.key) for record in records}
            records += tuple(record for record in parked if (record.scope, record.key) not in listed)
    if as_json:
        print(json.dumps([facts_of(record) for record in records], indent=2))
    elif records:
        put(table_of(records))
    else:
        print("No keys.")


@app.command()
def show(
    key: KeyArgument,
    store: StoreOption = None,
    scope: ScopeOption = None,
    body: Annotated[bool, typer.Option("--body", help="The body of the stored answer too.")] = False,  # noqa: FBT002 - as above
    as_json: JsonOption = False,  # noqa: FBT002 - as above
) -> None:
    """Show everything about one key: its record, its steps and its audit trail, which outlives it."""
    with opened(store) as keys:
        record = find(keys, key, scope)
        whose = record.scope if record else scope
        trail = keys.perform(ReadTrail(whose, key)) if whose is not None else ()
    if record is None:
        _show_trail_alone(key, scope, trail, as_json=as_json)
    elif as_json:
        print(json.dumps(all_facts_of(record, trail, with_body=body), indent=2))
    else:
        put(sheet_of([*record_lines(record, with_body=body), *trail_lines(trail)]))
        if body:
            print_body(record)


app.command()(resolving.release)
app.command()(resolving.resolve)


def _show_trail_alone(key: str, scope: str | None, trail: tuple[Entry, ...], *, as_json: bool) -> None:
    """Show what is left of a record that is gone."""
    if scope is None or not trail:
        raise KeyNotFound(missing(key, scope))
    if as_json:
        print(json.dumps({"key": key, "scope": scope, "state": None, "trail": trail_facts(trail)}, indent=2))
        return
    lines = [("key", Text(safe(key))), ("scope", Text(safe(scope))), ("state", Text("gone", "dim"))]
    put(sheet_of([*lines, *trail_lines(trail)]))
