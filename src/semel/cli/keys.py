"""``semel keys``: shows what a store holds. What operators may change is in ``resolving.py`` and ``erasing.py``.

Keys, answers and the results of steps may hold personal data.
"""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated

import typer
from rich.text import Text

from semel.cli import erasing, resolving
from semel.cli.address import StoreOption, opened
from semel.cli.finding import KeyArgument, KeyNotFound, ScopeOption, find, missing, spellings
from semel.cli.lists import Listing, WatchOption, show_list
from semel.cli.output import JsonOption, put, typed
from semel.cli.showing import (
    all_facts_of,
    facts_of,
    next_steps,
    print_body,
    record_lines,
    sheet_of,
    table_of,
    trail_facts,
    trail_lines,
)
from semel.core.commands import Browse, Filter, FindStuck, Look, ReadRequest, ReadTrail, Search
from semel.core.record import Entry, Record
from semel.core.state import State
from semel.core.trail import story
from semel.core.upkeep import MAX_BATCH
from semel.flows.upkeep import hold_of
from semel.stores import Store


class Shown(StrEnum):
    """What a list can be filtered by: a state, or *stuck*: in progress under a lease that has run out."""

    PENDING = State.PENDING
    PROCESSING = State.PROCESSING
    STUCK = "stuck"
    UNKNOWN = State.UNKNOWN
    COMPLETE = State.COMPLETE
    FAILED = State.FAILED


#: Parked keys that are listed in addition to the newest: more than an operator will resolve by hand.
MAX_PARKED = 1000
#: Records that are walked past to find some that are wanted, before all are.
MAX_SCAN = 5000

app = typer.Typer(
    help="Look at the keys of a store, free or resolve one, and erase a customer's.", no_args_is_help=True
)


@app.command("list")
def list_keys(
    *,
    store: StoreOption = None,
    state: Annotated[
        Shown | None, typer.Option(help="Only these: unknown must be resolved, stuck have lost their worker.")
    ] = None,
    scope: Annotated[str | None, typer.Option(help="Only keys of this owner, spelled as it is shown.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="How many, the newest first.")] = 20,
    as_json: JsonOption = False,
    watch: WatchOption = False,
) -> None:
    """List the newest keys, and after them older ones that must be resolved."""
    with opened(store) as keys:
        scopes = (None,) if scope is None else spellings(scope)

        def read() -> Listing:
            records = next((found for found in (_listed(keys, state, each, limit) for each in scopes) if found), ())
            return Listing([facts_of(record) for record in records], table_of(records) if records else None, "No keys.")

        show_list(read, as_json=as_json, watch=watch)


@app.command()
def show(
    key: KeyArgument,
    store: StoreOption = None,
    scope: ScopeOption = None,
    body: Annotated[bool, typer.Option("--body", help="Show the body of the stored answer, too.")] = False,  # noqa: FBT002 - typer makes an option of it
    as_json: JsonOption = False,  # noqa: FBT002 - as above
) -> None:
    """Show everything about one key: its record, its steps and its audit trail, which is kept longer."""
    with opened(store) as keys:
        record = find(keys, key, scope)
        if record is None:
            trail = _trail_alone(keys, key, scope)
        else:
            trail = keys.perform(ReadTrail(record.scope, record.key))
            request = keys.perform(ReadRequest(hold_of(record)))
    if record is None:
        _show_trail_alone(key, scope, trail, as_json=as_json)
    elif as_json:
        print(json.dumps(all_facts_of(record, trail, request, with_body=body), indent=2))
    else:
        lines = record_lines(record, request, with_body=body)
        said, commands = next_steps(record)
        put(sheet_of([*lines, *trail_lines(story(record, trail)), *said]), *commands)
        if body:
            print_body(record)


app.command()(resolving.release)
app.command()(resolving.resolve)
app.command("erase")(erasing.erase_scope)


def _listed(keys: Store, state: Shown | None, scope: str | None, limit: int) -> tuple[Record, ...]:
    if state is None:
        newest = newest_of(keys, limit, scope)
        # Parked operations wait for an operator, so they are listed however old they are.
        parked = newest_of(keys, MAX_PARKED, scope, State.UNKNOWN)
        listed = {(record.scope, record.key) for record in newest}
        return newest + tuple(record for record in parked if (record.scope, record.key) not in listed)
    if state is not Shown.STUCK:
        return newest_of(keys, limit, scope, State(state.value))
    found = keys.perform(FindStuck(limit if scope is None else max(limit, MAX_BATCH)))
    holds = [each.hold for each in found if scope in {None, each.hold.scope}]
    looked = (keys.perform(Look(hold.scope, hold.key)) for hold in holds[:limit])
    return tuple(record for record in looked if record is not None and record.is_stuck and not record.is_free)


def newest_of(keys: Store, limit: int, scope: str | None, state: State | None = None) -> tuple[Record, ...]:
    """Return the newest records of *scope*, in *state*."""
    # A search reads no more than it says, and finds the records of an owner who has a few by their scope. Only what is
    # rare is far to seek.
    page = keys.perform(Search(Filter(scope=scope, state=state), limit, MAX_SCAN))
    return keys.perform(Browse(limit=limit, scope=scope, state=state)) if page.is_cut else page.records


def _trail_alone(keys: Store, key: str, scope: str | None) -> tuple[Entry, ...]:
    """Read the trail of a record that is deleted, by any spelling of its key."""
    if scope is None:
        return ()
    named = ((owner, each) for owner in spellings(scope) for each in spellings(key))
    return next((trail for trail in (keys.perform(ReadTrail(*each)) for each in named) if trail), ())


def _show_trail_alone(key: str, scope: str | None, trail: tuple[Entry, ...], *, as_json: bool) -> None:
    """Show the trail of a record that is deleted."""
    if scope is None or not trail:
        raise KeyNotFound(missing(key, scope))
    key, scope = trail[0].key, trail[0].scope
    if as_json:
        print(json.dumps({"key": key, "scope": scope, "state": None, "trail": trail_facts(trail)}, indent=2))
        return
    lines = [("key", Text(typed(key))), ("scope", Text(typed(scope))), ("state", Text("gone", "dim"))]
    put(sheet_of([*lines, *trail_lines(trail)]))
