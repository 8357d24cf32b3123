"""How records are shown: as a list, as a sheet, as JSON. Nothing is read from a store here, and nothing is changed."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any

from rich.table import Table
from rich.text import Text

from semel.cli import address
from semel.cli.output import as_text, brief, hex_dump, iso, pasteable, relative, safe, typed, unfolded, width
from semel.core.derive import derive
from semel.core.message import Request
from semel.core.operator import outcome_of, resolving_commands
from semel.core.record import Entry, Milestone, Record
from semel.core.recovery import Done, Step, read_back
from semel.core.state import State
from semel.core.trace import read_trace
from semel.core.trail import story

HEX_DUMP_BYTES = 256
#: A step's result takes a line or two of a terminal; --json has all of it.
RESULT_CHARACTERS = 150
#: Columns that a scope leaves to the others: in 80, a UUID then takes two lines.
NOT_SCOPE_WIDTH = 66

STUCK_STYLE = "bold red"
STYLES = {
    State.PENDING: "yellow",
    State.PROCESSING: "cyan",
    State.UNKNOWN: STUCK_STYLE,
    State.COMPLETE: "green",
    State.FAILED: "red",
}

Line = tuple[str, Text]


def table_of(records: tuple[Record, ...]) -> Table:
    """Return a line for each of *records*."""
    scopes = {record.scope for record in records}
    # A single owner is shown once: the line then has room for a UUID in 80 columns.
    has_one_scope = len(scopes) == 1
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", caption_justify="left")
    if has_one_scope:
        table.caption = Text(f"scope: {typed(scopes.pop())}")
    table.add_column("key", overflow="fold")
    if not has_one_scope:
        # Folded and not cut: operators copy it into --scope.
        table.add_column("scope", overflow="fold", max_width=max(width() - NOT_SCOPE_WIDTH, len("scope")))
    for name in ("state", "try", "status", "age", "ends"):
        table.add_column(name, no_wrap=True, justify="right" if name in {"try", "status", "age"} else "left")
    for record in records:
        owner = [] if has_one_scope else [Text(typed(record.scope))]
        table.add_row(Text(typed(record.key)), *owner, *_cells(record))
    return table


def sheet_of(lines: Iterable[Line]) -> Table:
    """Return a sheet of names and values."""
    sheet = Table.grid(padding=(0, 2, 0, 0))
    sheet.add_column(style="bold", no_wrap=True)
    sheet.add_column(overflow="fold")
    for name, value in lines:
        sheet.add_row(name, value)
    return sheet


def record_lines(record: Record, request: Request | None = None, *, with_body: bool = False) -> Iterator[Line]:
    """Return everything about *record* but its body; *request* is the one that was stored with it."""
    yield "key", Text(typed(record.key))
    yield "scope", Text(typed(record.scope))
    if request is not None:
        yield "request", Text(safe(f"{request.head.method} {request.head.path}"))
    elif record.request_line:
        yield "request", Text(safe(record.request_line))
    yield "state", Text(record.state, STYLES[record.state])
    yield "attempt", Text(str(record.attempt))
    if record.is_accepted:
        yield "accepted", Text("to be run by a worker")
    if record.milestone is not None:
        yield "progress", Text(safe(_progress(record.milestone)))
    if record.recovery_point is not None:
        yield "recovery point", Text(safe(record.recovery_point))
    for number, line in enumerate(_steps(record)):
        yield "" if number else "steps", line
    yield from _trace(record)
    yield "fingerprint", Text(record.fingerprint.hex() or "none")
    yield from _times(record)
    if record.answer is None:
        return
    yield "status", Text(_status(record))
    for number, pair in enumerate(record.answer.headers):
        yield "" if number else "headers", Text(safe(b": ".join(pair).decode("latin-1")))
    if record.answer.body is None:
        yield "body", Text("not kept: it was too large, a stream, past its retention, or erased")
    else:
        hint = "" if with_body or not record.answer.body else " (to see it: --body)"
        yield "body", Text(f"{len(record.answer.body)} bytes{hint}")


def _trace(record: Record) -> Iterator[Line]:
    trace = read_trace(record.traceparent)
    if trace is not None:
        yield "trace", Text(trace.trace_id)


def next_steps(record: Record) -> tuple[list[Line], list[Text]]:
    """Return what an operator can do about *record*: a line that says so, and the commands."""
    name = f"{pasteable(record.key)} --scope {pasteable(record.scope)}"
    if record.state is State.UNKNOWN:
        step = read_back(record.steps).unknown
        what = f"{step.name} happened; ask the provider by the key above" if step else "it happened"
        said = f"Find out whether {what}. Then type one of:"
        return next_steps_of(said, *resolving_commands(record))
    if record.is_free:
        said = "It is free: a retry goes on with it, or a worker, if its request was stored. To forget it:"
        return next_steps_of(said, f"semel keys release {name}")
    if record.is_stuck:
        said = "A retry takes it over, or is refused if it may not run again. Without a retry, free it or park it:"
        return next_steps_of(said, "semel sweep")
    if record.state is State.PENDING:
        return next_steps_of("A worker runs it:", "semel work --app MODULE:NAME")
    return [], []


def next_steps_of(said: str, *commands: str) -> tuple[list[Line], list[Text]]:
    """Return the last line of a sheet, and *commands* to be printed below it."""
    program = address.project.program if address.project else "semel"
    return [("next", Text(said))], [unfolded(f"  {program}{each.removeprefix('semel')}") for each in commands]


def trail_lines(trail: tuple[Entry, ...]) -> Iterator[Line]:
    """Return what happened: when, in which attempt, what, and by which process or operator, if known."""
    for number, entry in enumerate(trail):
        said = f"{entry.event} ({entry.detail})" if entry.detail else entry.event
        line = f"{iso(entry.at)}  attempt {entry.attempt}  {safe(said)}"
        yield "" if number else "trail", Text(f"{line}  by {safe(entry.actor)}" if entry.actor else line)


def print_body(record: Record) -> None:
    """Print the body of the stored answer: as it is, or as the head of a hex dump."""
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


def facts_of(record: Record) -> dict[str, Any]:
    """Return what a list shows of *record*, under stable names, without its token."""
    return {
        "key": record.key,
        "scope": record.scope,
        "state": record.state,
        "attempt": record.attempt,
        "status": record.answer.status if record.answer else None,
        "recovery_point": record.recovery_point,
        "is_accepted": record.is_accepted,
        "request_line": record.request_line or None,
        "progress": record.milestone.fraction if record.milestone else None,
        "note": record.milestone.note if record.milestone else None,
        "created_at": iso(record.created_at),
        "lease_expires_at": iso(record.lease_expires_at),
        "completed_at": iso(record.completed_at),
        "expires_at": iso(record.expires_at),
        "read_at": iso(record.read_at),
        "is_stuck": record.is_stuck,
        "is_free": record.is_free,
        "is_expired": record.is_expired,
    }


def all_facts_of(
    record: Record, trail: tuple[Entry, ...], request: Request | None = None, *, with_body: bool
) -> dict[str, Any]:
    """Return everything about *record*; *request* is the one that was stored with it."""
    trace = read_trace(record.traceparent)
    facts = facts_of(record) | {
        "request": request and {"method": request.head.method, "path": request.head.path},
        "fingerprint": record.fingerprint.hex(),
        "trace_id": trace.trace_id if trace else None,
        "steps": [_step_facts(record, step) for step in read_back(record.steps).steps],
        "trail": trail_facts(story(record, trail)),
    }
    answer = record.answer
    if answer is None:
        return facts
    facts["headers"] = [[name.decode("latin-1"), value.decode("latin-1")] for name, value in answer.headers]
    facts["body_bytes"] = None if answer.body is None else len(answer.body)
    if with_body and answer.body is not None:
        facts["body_base64"] = base64.b64encode(answer.body).decode()
        facts["body_text"] = as_text(answer.body)
    return facts


def trail_facts(trail: tuple[Entry, ...]) -> list[dict[str, Any]]:
    """Return what happened, line by line. Lines from the record itself have no actor."""
    return [
        {
            "at": iso(entry.at),
            "attempt": entry.attempt,
            "event": entry.event,
            "actor": entry.actor or None,
            "detail": entry.detail,
        }
        for entry in trail
    ]


def _cells(record: Record) -> Iterator[Text]:
    yield Text(record.state, STUCK_STYLE if record.is_stuck and not record.is_free else STYLES[record.state])
    yield Text(str(record.attempt), "" if record.attempt == 1 else "bold")
    yield Text(_status(record))
    yield Text(brief(record.read_at - record.created_at))
    yield _ends(record)


def _ends(record: Record) -> Text:
    if record.lease_left is not None:
        is_stuck = record.is_stuck and not record.is_free
        what = "free" if record.is_free else "stuck" if is_stuck else "lease"
        return Text(f"{what} {brief(record.lease_left)}", STUCK_STYLE if is_stuck else "")
    if record.is_expired:
        return Text(f"expired {brief(record.retention_left)}", "dim")
    if record.state is State.UNKNOWN:
        return Text("to be resolved", STUCK_STYLE)
    if record.state is State.PENDING:
        return Text("to be begun")
    return Text(f"kept {brief(record.retention_left)}")


def _times(record: Record) -> Iterator[Line]:
    yield "created", _time(record, record.created_at)
    if record.lease_expires_at is not None:
        is_stuck = record.is_stuck and not record.is_free
        name = "free since" if record.is_free else "stuck since" if is_stuck else "lease until"
        yield name, _time(record, record.lease_expires_at, STUCK_STYLE if is_stuck else "")
    if record.completed_at is not None:
        yield "ended", _time(record, record.completed_at)
    if record.state is State.UNKNOWN:
        yield "kept until", Text("it is resolved", STUCK_STYLE)
    else:
        yield "expired" if record.is_expired else "kept until", _time(record, record.expires_at)


def _progress(milestone: Milestone) -> str:
    return f"{milestone.fraction:.0%}" + (f": {milestone.note}" if milestone.note else "")


def _steps(record: Record) -> Iterator[Text]:
    for step in read_back(record.steps).steps:
        said = f"{step.kind} {safe(step.name)}"
        if isinstance(step, Done):
            yield Text(f"{said} done: {_shortened(step.result)}")
        elif outcome_of(record, step) == "begun":
            yield Text(f"{said} begun: not ended yet", STYLES[State.PROCESSING])
        else:
            yield Text(f"{said} begun: outcome unknown", STUCK_STYLE)
        if step.kind == "effect":
            yield Text(f"  its key at the provider: {_key_of(record, step)}")


def _step_facts(record: Record, step: Step) -> dict[str, Any]:
    facts = {step.kind: step.name, "outcome": outcome_of(record, step)}
    if isinstance(step, Done):
        facts["result"] = step.result
    return facts | ({"idempotency_key": _key_of(record, step)} if step.kind == "effect" else {})


def _key_of(record: Record, step: Step) -> str:
    return derive(record.scope, record.key, step.name)


def _shortened(result: Any) -> str:
    text = json.dumps(result, ensure_ascii=False)
    if len(text) > RESULT_CHARACTERS:
        text = f"{text[:RESULT_CHARACTERS]}... ({len(text)} characters; --json has them all)"
    return safe(text)


def _status(record: Record) -> str:
    return str(record.answer.status) if record.answer else "-"


def _time(record: Record, moment: datetime, style: str = "") -> Text:
    return Text(f"{iso(moment)} ({relative(moment - record.read_at)})", style)
