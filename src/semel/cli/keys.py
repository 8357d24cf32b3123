"""``semel keys``: looks at what a store holds, and changes nothing. Keys and answers may hold personal data."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from semel.cli.address import StoreOption, opened
from semel.cli.output import as_text, brief, hex_dump, pasteable, put, relative, safe, width
from semel.core.commands import Browse, Look
from semel.core.record import Record
from semel.core.state import State
from semel.errors import ConfigurationError, SemelError

#: As many owners of one key as are listed before a person is asked to choose.
SCOPES_SHOWN = 20
HEX_DUMP_BYTES = 256
#: What a scope leaves to the other columns: in 80, a UUID then takes two lines.
NOT_SCOPE_WIDTH = 66

STYLES = {State.PENDING: "yellow", State.PROCESSING: "cyan", State.COMPLETE: "green", State.FAILED: "red"}
STUCK_STYLE = "bold red"

app = typer.Typer(help="Look at the keys of a store. They may hold personal data.", no_args_is_help=True)

JsonOption = Annotated[bool, typer.Option("--json", help="For machines.")]


class KeyNotFound(SemelError):
    """The store has no such key."""


@app.command("list")
def list_keys(
    store: StoreOption = None,
    state: Annotated[State | None, typer.Option(help="Only those in this state.")] = None,
    scope: Annotated[str | None, typer.Option(help="Only those of this owner.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="How many, the newest first.")] = 20,
    as_json: JsonOption = False,  # noqa: FBT002 - typer makes an option of it
) -> None:
    """List the newest keys."""
    with opened(store) as keys:
        records = keys.perform(Browse(limit=limit, scope=scope, state=state))
    if as_json:
        print(json.dumps([_facts(record) for record in records], indent=2))
    elif records:
        put(_table(records))
    else:
        print("No keys.")


@app.command()
def show(
    key: Annotated[str, typer.Argument(metavar="KEY")],
    store: StoreOption = None,
    scope: Annotated[str | None, typer.Option(help="Whose key, where several owners use the same.")] = None,
    body: Annotated[bool, typer.Option("--body", help="The body of the stored answer too.")] = False,  # noqa: FBT002 - as above
    as_json: JsonOption = False,  # noqa: FBT002 - as above
) -> None:
    """Show everything about one key."""
    with opened(store) as keys:
        found = keys.perform(Browse(limit=SCOPES_SHOWN, key=key, scope=scope))
        if len(found) > 1:
            raise ConfigurationError(_which(found))
        record = keys.perform(Look(found[0].scope, key)) if found else None
    if record is None:
        raise KeyNotFound(f"The store has no key {pasteable(key)}" + (f" of {pasteable(scope)}." if scope else "."))
    if as_json:
        print(json.dumps(_all_facts(record, with_body=body), indent=2))
    else:
        put(_sheet(record, with_body=body))
        if body:
            _print_body(record)


def _table(records: tuple[Record, ...]) -> Table:
    scopes = {record.scope for record in records}
    # One owner is said once: the line then has room for a UUID in 80 columns.
    has_one_scope = len(scopes) == 1
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", caption_justify="left")
    if has_one_scope:
        table.caption = Text(f"scope: {safe(scopes.pop())}")
    table.add_column("key", overflow="fold")
    if not has_one_scope:
        table.add_column("scope", overflow="ellipsis", no_wrap=True, max_width=width() - NOT_SCOPE_WIDTH)
    for name in ("state", "try", "status", "age", "ends"):
        table.add_column(name, no_wrap=True, justify="right" if name in {"try", "status", "age"} else "left")
    for record in records:
        whose = [] if has_one_scope else [Text(safe(record.scope))]
        table.add_row(Text(safe(record.key)), *whose, *_cells(record))
    return table


def _cells(record: Record) -> Iterator[Text]:
    yield Text(record.state, STUCK_STYLE if record.is_stuck else STYLES[record.state])
    yield Text(str(record.attempt), "" if record.attempt == 1 else "bold")
    yield Text(_status(record))
    yield Text(brief(_now(record) - record.created_at))
    yield _ends(record)


def _ends(record: Record) -> Text:
    if record.is_stuck:
        return Text(f"stuck {brief(record.lease_left or timedelta(0))}", STUCK_STYLE)
    if record.lease_left is not None:
        return Text(f"lease {brief(record.lease_left)}")
    if record.is_expired:
        return Text(f"expired {brief(record.retention_left)}", "dim")
    return Text(f"kept {brief(record.retention_left)}")


def _sheet(record: Record, *, with_body: bool) -> Table:
    sheet = Table.grid(padding=(0, 2, 0, 0))
    sheet.add_column(style="bold", no_wrap=True)
    sheet.add_column(overflow="fold")
    for name, value in _lines(record, with_body=with_body):
        sheet.add_row(name, value)
    return sheet


def _lines(record: Record, *, with_body: bool) -> Iterator[tuple[str, Text]]:
    yield "key", Text(safe(record.key))
    yield "scope", Text(safe(record.scope))
    yield "state", Text(record.state, STYLES[record.state])
    yield "attempt", Text(str(record.attempt))
    if record.recovery_point is not None:
        yield "recovery point", Text(safe(record.recovery_point))
    yield "fingerprint", Text(record.fingerprint.hex() or "none")
    yield "created", _time(record, record.created_at)
    if record.lease_expires_at is not None:
        name = "stuck since" if record.is_stuck else "lease until"
        yield name, _time(record, record.lease_expires_at, STUCK_STYLE if record.is_stuck else "")
    if record.completed_at is not None:
        yield "ended", _time(record, record.completed_at)
    yield "expired" if record.is_expired else "kept until", _time(record, record.expires_at)
    if record.answer is None:
        return
    yield "status", Text(_status(record))
    for number, pair in enumerate(record.answer.headers):
        yield "" if number else "headers", Text(safe(b": ".join(pair).decode("latin-1")))
    if record.answer.body is None:
        yield "body", Text("not kept: it was too large, or a stream")
    else:
        hint = "" if with_body or not record.answer.body else " (to see it: --body)"
        yield "body", Text(f"{len(record.answer.body)} bytes{hint}")


def _print_body(record: Record) -> None:
    body = record.answer.body if record.answer else None
    if not body:
        return
    print()
    text = as_text(body)
    if text is not None:
        print(text)
        return
    print(hex_dump(body[:HEX_DUMP_BYTES]))
    if len(body) > HEX_DUMP_BYTES:
        print(f"... and {len(body) - HEX_DUMP_BYTES} bytes more; --json has them all.")


def _facts(record: Record) -> dict[str, Any]:
    return {
        "key": record.key,
        "scope": record.scope,
        "state": record.state,
        "attempt": record.attempt,
        "status": record.answer.status if record.answer else None,
        "recovery_point": record.recovery_point,
        "created_at": _iso(record.created_at),
        "lease_expires_at": _iso(record.lease_expires_at),
        "completed_at": _iso(record.completed_at),
        "expires_at": _iso(record.expires_at),
        "read_at": _iso(_now(record)),
        "is_stuck": record.is_stuck,
        "is_expired": record.is_expired,
    }


def _all_facts(record: Record, *, with_body: bool) -> dict[str, Any]:
    facts = _facts(record) | {"fingerprint": record.fingerprint.hex()}
    answer = record.answer
    if answer is None:
        return facts
    facts["headers"] = [[name.decode("latin-1"), value.decode("latin-1")] for name, value in answer.headers]
    facts["body_bytes"] = None if answer.body is None else len(answer.body)
    if with_body and answer.body is not None:
        facts["body_base64"] = base64.b64encode(answer.body).decode()
        facts["body_text"] = as_text(answer.body)
    return facts


def _which(found: tuple[Record, ...]) -> str:
    scopes = ", ".join(pasteable(record.scope) for record in found)
    more = ", and perhaps others" if len(found) == SCOPES_SHOWN else ""
    return f"Several owners use this key. Say whose with --scope: {scopes}{more}."


def _status(record: Record) -> str:
    return str(record.answer.status) if record.answer else "-"


def _time(record: Record, moment: datetime, style: str = "") -> Text:
    return Text(f"{_iso(moment)} ({relative(moment - _now(record))})", style)


def _now(record: Record) -> datetime:
    """Return when the record was read, by the database's clock: the only one that its times can be compared with."""
    return record.expires_at - record.retention_left


def _iso(moment: datetime | None) -> str | None:
    return None if moment is None else moment.isoformat(timespec="milliseconds")
