"""``semel keys release`` and ``resolve``: an operator says what happened. Each command asks before it writes.

The audit trail has the operator's name. A record that has ended is never changed here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Annotated, Any, Concatenate, ParamSpec

import typer

from semel.cli.address import StoreOption, opened
from semel.cli.finding import KeyArgument, ScopeOption, find_required
from semel.cli.output import put, safe
from semel.cli.showing import record_lines, sheet_of
from semel.core.commands import Verdict
from semel.core.operator import ENDED, release_means, resolving_means, why_not_resolved
from semel.core.recovery import as_json
from semel.core.state import TERMINAL, State
from semel.errors import ConfigurationError, ResultNotJSON, SemelError
from semel.flows import upkeep
from semel.flows.ports import Ports
from semel.guard.running import run
from semel.stores import Store
from semel.stores.base import this_user
from semel.work.service import ServicePorts

P = ParamSpec("P")
YesOption = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")]


class CantBeFreed(SemelError):
    """This key can't be freed."""


class CantBeResolved(SemelError):
    """There is nothing to resolve here."""


class RecordChanged(SemelError):
    """The record has changed meanwhile, and nothing was done. Look at it again: semel keys show."""


def release(
    key: KeyArgument,
    *,
    store: StoreOption = None,
    scope: ScopeOption = None,
    yes: YesOption = False,
) -> None:
    """Free the key of an operation that has not ended: a retry runs it again from its beginning."""
    with opened(store) as keys:
        record = find_required(keys, key, scope)
        if record.state in TERMINAL:
            raise CantBeFreed(ENDED)
        put(sheet_of(record_lines(record)))
        _agree(release_means(record), "Free this key?", yes=yes)
        _carry_out(keys, upkeep.release, upkeep.hold_of(record))
    print("Freed.")


def resolve(
    key: KeyArgument,
    *,
    applied: Annotated[
        str | None, typer.Option(metavar="RESULT", help="The operation or effect happened, with this result (JSON).")
    ] = None,
    not_applied: Annotated[bool, typer.Option("--not-applied", help="The operation or effect did not happen.")] = False,
    store: StoreOption = None,
    scope: ScopeOption = None,
    yes: YesOption = False,
) -> None:
    """State whether an operation with an unknown outcome happened."""
    if not_applied == (applied is not None):
        raise ConfigurationError("Say what happened: either --applied RESULT or --not-applied.")
    result = None if applied is None else _parsed(applied)
    with opened(store) as keys:
        record = find_required(keys, key, scope)
        if record.state is not State.UNKNOWN:
            raise CantBeResolved(why_not_resolved(record))
        put(sheet_of(record_lines(record)))
        means = [resolving_means(record, is_applied=applied is not None)]
        if applied is not None:
            means.append(f"Result: {safe(json.dumps(result, ensure_ascii=False))}")
        _agree(means, "Is that right?", yes=yes)
        if applied is None:
            _carry_out(keys, upkeep.resolve_not_applied, record)
        else:
            _carry_out(keys, upkeep.resolve_applied, record, result)
    print("Resolved.")


def _parsed(text: str) -> Any:
    try:
        return as_json("--applied", json.loads(text))
    except (ValueError, ResultNotJSON, RecursionError):
        message = (
            """RESULT is not JSON. Quote it for the shell: --applied '{"id": 7}', --applied '"text"', --applied null."""
        )
        raise ConfigurationError(message) from None


def _agree(means: list[str], question: str, *, yes: bool) -> None:
    print()
    for line in means:
        print(line)
    if not yes:
        typer.confirm(question, abort=True)


def _carry_out(
    keys: Store,
    flow: Callable[Concatenate[Ports, P], Coroutine[Any, Any, Verdict]],
    /,
    *args: P.args,
    **kwargs: P.kwargs,
) -> None:
    keys.actor = this_user()
    if run(flow, ServicePorts(keys), *args, **kwargs) is Verdict.FENCED:
        raise RecordChanged
