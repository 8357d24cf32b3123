"""What those who clean up ask of the table, and operators, as PostgreSQL statements. It runs nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from semel.core.commands import (
    AddCounts,
    Command,
    Discard,
    Erase,
    Erased,
    EraseTrail,
    FindStuck,
    Minutes,
    ReadCounts,
    ReadRequest,
    ReadTrail,
    Reap,
    Reaped,
    ReapInbox,
    ReapTrail,
    Resolution,
    RotateAnswers,
    Rotated,
    Sweep,
    Unpark,
    Verdict,
)
from semel.core.message import Request
from semel.core.record import Entry, Hold, Stuck
from semel.core.recovery import written
from semel.core.state import State
from semel.core.upkeep import FIRST_PAUSE, MAX_DOUBLINGS
from semel.stores import erasing
from semel.stores.postgres.builder import Builder, of_answer, of_hold
from semel.stores.postgres.rows import Row, verdict
from semel.stores.postgres.searching import SEARCHING
from semel.stores.requests import read_back
from semel.stores.statement import Statement

#: How far the watermark stays behind the clock, in seconds: more than any statement may take (``address.py``), and with
#: it a claim from its clock to its COMMIT.
SETTLED_SECONDS = 15
#: How many records one statement walks past: milliseconds. A thousand operations a second are ten times less.
MAX_WALK = 10_000
#: How many records behind the watermark are looked at by a service that has not looked for a while: a millisecond.
MAX_BACK = 2000
#: So many of these statements, at most, go in front of one look at what is stuck: a table that was never walked along.
MAX_WALKS = 100

#: How many records are looked at, however few are wanted, so that each scope has its turn among them: milliseconds.
MIN_WINDOW = 5000


def advance(builder: Builder) -> Statement[bool]:
    """Walk on along the records, and follow what has not ended; whether there are more to walk past."""
    bounds, now = builder.bounds, time.monotonic()

    def read(rows: Sequence[Row]) -> bool:
        bounds.walked_at = now
        return bool(rows[0][0])

    # Only in a longer time could a clock that was set back come past the watermark unseen.
    name = "advance" if now - bounds.walked_at <= SETTLED_SECONDS else "advance_back"
    return builder.statement(name, read, settled=SETTLED_SECONDS, window=MAX_WALK, back=MAX_BACK)


def _find_stuck(builder: Builder, command: FindStuck) -> Statement[tuple[Stuck, ...]]:
    return builder.statement(
        "find_stuck",
        lambda rows: tuple(Stuck(Hold(*row[:4]), *row[4:]) for row in rows),
        limit=command.limit,
        window=max(command.limit, MIN_WINDOW),
        with_request=command.with_request,
        with_no_token=command.with_no_token,
        with_pending=command.with_pending,
        only_due=command.only_due,
        first_pause=FIRST_PAUSE.total_seconds(),
        most_doublings=MAX_DOUBLINGS,
    )


def _read_request(builder: Builder, command: ReadRequest) -> Statement[Request | None]:
    def read(rows: Sequence[Row]) -> Request | None:
        return read_back(*rows[0]) if rows else None

    return builder.statement("read_request", read, **of_hold(command.hold))


def _sweep(builder: Builder, command: Sweep) -> Statement[Verdict]:
    return builder.statement("sweep", verdict, **of_hold(command.hold))


def _reap(builder: Builder, command: Reap) -> Statement[Reaped]:
    return builder.statement("reap", lambda rows: Reaped(*rows[0]), limit=command.limit, **of_answer(command.abandoned))


def _reap_trail(builder: Builder, command: ReapTrail) -> Statement[int]:
    return builder.statement(
        "reap_trail",
        lambda rows: rows[0][0],
        limit=command.limit,
        older_than=command.older_than.total_seconds(),
    )


def _rotate(builder: Builder, command: RotateAnswers) -> Statement[Rotated]:
    return builder.statement("rotate", lambda rows: Rotated(*rows[0]), limit=command.limit)


def _reap_inbox(builder: Builder, command: ReapInbox) -> Statement[int]:
    return builder.statement(
        "reap_inbox",
        lambda rows: rows[0][0],
        limit=command.limit,
        older_than=command.older_than.total_seconds(),
    )


def _add_counts(builder: Builder, command: AddCounts) -> Statement[None]:
    outcomes, numbers = list(command.counts), list(command.counts.values())
    return builder.statement("add_counts", lambda _: None, outcomes=outcomes, numbers=numbers)


def _read_counts(builder: Builder, command: ReadCounts) -> Statement[Minutes]:
    def read(rows: Sequence[Row]) -> Minutes:
        return Minutes(rows[0][0], tuple((row[1], row[2], row[3]) for row in rows if row[1] is not None))

    return builder.statement("read_counts", read, minutes=command.minutes)


def _erase(builder: Builder, command: Erase) -> Statement[Erased]:
    def read(rows: Sequence[Row]) -> Erased:
        walked = [erasing.Walked(scope, key, State(state), *rest) for scope, key, state, *rest in rows]
        return erasing.records(command, walked)

    scope, key, _, end = erasing.span(command)
    return builder.statement("erase", read, at_scope=scope, at_key=key, end=end, **_of_erasure(command))


def _erase_trail(builder: Builder, command: EraseTrail) -> Statement[Erased]:
    def read(rows: Sequence[Row]) -> Erased:
        return erasing.lines(command, rows[0][3] if rows else 0, [(row[0], row[1], row[2]) for row in rows])

    scope, key, number, end = erasing.span(command)
    place = {"at_scope": scope, "at_key": key, "at_id": number, "end": end}
    return builder.statement("erase_trail", read, **place, **_of_erasure(command))


def _of_erasure(command: Erase | EraseTrail) -> dict[str, Any]:
    return {"limit": command.limit, "is_preview": command.is_preview, "reason": command.reason}


def _discard(builder: Builder, command: Discard) -> Statement[Verdict]:
    return builder.statement("discard", verdict, **of_hold(command.hold))


def _unpark(builder: Builder, command: Unpark) -> Statement[Verdict]:
    progress = command.progress
    return builder.statement(
        "unpark",
        verdict,
        steps=written(progress),
        recovery_point=progress.recovery_point,
        **of_hold(command.hold),
    )


def _resolve(builder: Builder, command: Resolution) -> Statement[Verdict]:
    return builder.statement("resolve", verdict, **of_hold(command.hold), **of_answer(command.answer))


def _read_trail(builder: Builder, command: ReadTrail) -> Statement[tuple[Entry, ...]]:
    return builder.statement(
        "read_trail",
        lambda rows: tuple(Entry(*row) for row in rows),
        scope=command.scope,
        key=command.key,
        limit=command.limit,
    )


UPKEEP: dict[type[Command[Any]], Callable[[Builder, Any], Statement[Any]]] = {
    FindStuck: _find_stuck,
    ReadRequest: _read_request,
    Sweep: _sweep,
    Reap: _reap,
    ReapTrail: _reap_trail,
    ReapInbox: _reap_inbox,
    RotateAnswers: _rotate,
    AddCounts: _add_counts,
    ReadCounts: _read_counts,
    Erase: _erase,
    EraseTrail: _erase_trail,
    Discard: _discard,
    Unpark: _unpark,
    Resolution: _resolve,
    ReadTrail: _read_trail,
    **SEARCHING,
}
