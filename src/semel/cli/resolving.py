"""``semel keys release`` and ``resolve``: an operator says what happened. Each command asks before it writes.

The audit trail has the operator's name. A record that has ended is never changed here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Annotated, Any, Concatenate, ParamSpec

import typer

from semel.cli.address import StoreOption, opened
from semel.cli.finding import KeyArgument, ScopeOption, find_required
from semel.cli.output import as_text, put, safe
from semel.cli.showing import record_lines, sheet_of
from semel.core.commands import Verdict
from semel.core.operator import (
    ENDED,
    ReasonNotKept,
    ResultUnreadable,
    explanation,
    granted,
    read_headers,
    read_result,
    release_means,
    resolving_means,
    why_not_resolved,
)
from semel.core.record import Record
from semel.core.recovery import read_back
from semel.core.state import TERMINAL, State
from semel.errors import ConfigurationError, SemelError
from semel.flows import upkeep
from semel.flows.ports import Ports
from semel.guard.running import run
from semel.stores import Store
from semel.stores.base import this_user
from semel.work.service import ServicePorts

P = ParamSpec("P")
YesOption = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")]
ReasonOption = Annotated[str | None, typer.Option(metavar="TEXT", help="Why, for the audit trail.")]


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
    reason: ReasonOption = None,
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
        _explain(keys, record, reason)


def resolve(
    key: KeyArgument,
    *,
    applied: Annotated[
        str | None, typer.Option(metavar="RESULT", help="The operation or effect happened, with this result (JSON).")
    ] = None,
    not_applied: Annotated[bool, typer.Option("--not-applied", help="The operation or effect did not happen.")] = False,
    status: Annotated[
        int | None, typer.Option(metavar="STATUS", help="The status of the operation's answer, instead of 200.")
    ] = None,
    header: Annotated[
        list[str] | None, typer.Option(metavar="'NAME: VALUE'", help="A header of that answer. Repeatable.")
    ] = None,
    body_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The body of that answer, as it is, instead of RESULT.")
    ] = None,
    store: StoreOption = None,
    scope: ScopeOption = None,
    reason: ReasonOption = None,
    yes: YesOption = False,
) -> None:
    """State whether an operation with an unknown outcome happened."""
    is_applied = applied is not None or body_file is not None
    if not_applied == is_applied or (applied is not None and body_file is not None):
        raise ConfigurationError(
            "Say what happened: either --applied RESULT or --not-applied; --body-file FILE in place of a RESULT."
        )
    result = None if applied is None else _parsed(applied)
    answer = None
    if status is not None or header or body_file is not None:
        answer = granted(result, status=status or 200, headers=read_headers(header or ()), body=_read(body_file))
        if body_file is not None and answer.body and b"content-type" not in dict(answer.headers):
            raise ConfigurationError("What is in FILE? Say it: --header 'Content-Type: text/plain'.")
    with opened(store) as keys:
        record = find_required(keys, key, scope)
        if record.state is not State.UNKNOWN:
            raise CantBeResolved(why_not_resolved(record))
        if answer is not None and (not_applied or read_back(record.steps).unknown is not None):
            raise ConfigurationError(
                "--status, --header and --body-file are for an operation that ends here. This one goes on, and its "
                "handler answers."
            )
        put(sheet_of(record_lines(record)))
        means = [resolving_means(record, is_applied=is_applied, status=answer.status if answer else 200)]
        if answer is not None:
            means += [safe(f"{name.decode()}: {value.decode('latin-1')}") for name, value in answer.headers]
            means.append(_shown(answer.body or b""))
        elif is_applied:
            means.append(f"Result: {safe(json.dumps(result, ensure_ascii=False))}")
        _agree(means, "Is that right?", yes=yes)
        if is_applied:
            _carry_out(keys, upkeep.resolve_applied, record, result, answer)
        else:
            _carry_out(keys, upkeep.resolve_not_applied, record)
        print("Resolved.")
        _explain(keys, record, reason)


def _parsed(text: str) -> Any:
    try:
        return read_result(text)
    except ResultUnreadable as error:
        how = """Quote it for the shell: --applied '{"id": 7}', --applied '"text"', --applied null."""
        raise ConfigurationError(f"{str(error).replace('The result', 'RESULT')} {how}") from None


def _read(path: Path | None) -> bytes | None:
    try:
        return None if path is None else path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{path} can't be read: {error.strerror}.") from None


def _shown(body: bytes) -> str:
    text = as_text(body)
    return "No body." if not body else safe(text) if text is not None else f"{len(body)} bytes"


def _explain(keys: Store, record: Record, reason: str | None) -> None:
    if reason is not None and reason.strip():
        try:
            keys.perform(explanation(upkeep.hold_of(record), reason))
        except SemelError as error:
            raise ReasonNotKept(f"It is done, but the audit trail does not have the reason: {error}") from error


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
