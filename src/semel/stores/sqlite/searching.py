"""What people search for and count, on one connection. Commands of requests and services are in ``commands.py``.

A search walks along rowids, or along an index, in one statement, and looks at what it came past in another; both are
in one file, so that costs no round trip.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Protocol

from semel.core.commands import Page, Search, Survey, Surveyed
from semel.core.events import StoreSurveyed
from semel.core.key import digest_of
from semel.core.place import read_place, written_place
from semel.core.record import Record
from semel.core.search import FEW, walk_of
from semel.stores.sqlite import statements as by

#: Past every rowid and every time.
_END = 2**62

_ROW = re.compile(r"[0-9]{1,18}")

#: Rowid, time of making, and key.
Step = tuple[int, int, str]


class Session(Protocol):
    """What a search runs on."""

    @property
    def statements(self) -> by.Statements:
        """The statements of its table."""

    def run(self, sql: str, parameters: Sequence[Any] = ()) -> list[Any]:
        """Run it, and return its rows."""


def search(session: Session, command: Search) -> Page:
    """Read a page of the records that fit."""
    at, row = (_END, _END) if command.after is None else _after(command.after)
    steps, is_whole, by_age = _walk(session, command, at, row)
    wanted = command.wanted
    if wanted.digest is not None:
        kept = [each for each in steps if digest_of(each[2]).startswith(wanted.digest)]
    else:
        kept = steps
    rows = session.run(*_fitting(session, command, kept, by_age=by_age))
    found = [(each[0], by.read_record(each[1:])) for each in rows]
    if len(found) > command.limit:
        found = found[: command.limit]
        return Page(_records(found), _place(found[-1]), len(steps))
    if is_whole or not steps:
        return Page(_records(found), None, len(steps))
    last = steps[-1]
    return Page(_records(found), written_place(last[1], str(last[0])), len(steps), is_cut=True)


def _walk(session: Session, command: Search, at: int, row: int) -> tuple[list[Step], bool, bool]:
    """Return what was walked past, whether that was all there is, and whether its order is that of age."""
    wanted, statements, scan = command.wanted, session.statements, walk_of(command)
    if wanted.is_unfinished:
        steps = session.run(statements.walk_unfinished, (at, row, scan))
        return steps, len(steps) < scan, True
    if wanted.scope is not None:
        few = min(FEW, scan)
        steps = session.run(statements.walk_scope, (wanted.scope, few + 1))
        if len(steps) <= few:
            return [each for each in steps if (each[1], each[0]) < (at, row)], True, True
    steps = session.run(statements.walk, (row, scan))
    return steps, len(steps) < scan, False


def _fitting(session: Session, command: Search, steps: list[Step], *, by_age: bool) -> tuple[str, list[Any]]:
    wanted = command.wanted
    lowest, highest = wanted.status or (None, None)
    query = session.statements.search
    values = {
        "places": json.dumps([each[0] for each in steps]),
        "scope": wanted.scope,
        "key": wanted.key,
        "state": wanted.state and str(wanted.state),
        "stuck": wanted.is_stuck,
        "endpoint": wanted.endpoint,
        "newer": None if wanted.newer_than is None else by.milliseconds(wanted.newer_than),
        "older": None if wanted.older_than is None else by.milliseconds(wanted.older_than),
        "lowest": lowest,
        "highest": highest,
        "reason": wanted.reason,
        "by_age": by_age,
        "limit": command.limit + 1,
    }
    return by.counted(query), [values[name] for name in query.parameters]


def _records(found: list[tuple[int, Record]]) -> tuple[Record, ...]:
    return tuple(record for _, record in found)


def _place(found: tuple[int, Record]) -> str:
    return written_place(by.written_time(found[1].created_at), str(found[0]))


def _after(place: str) -> tuple[int, int]:
    at, row, _ = read_place(place)
    return at, int(row) if _ROW.fullmatch(row) else _END


def survey(session: Session, command: Survey) -> Surveyed:
    """Count the records of each kind."""
    query = session.statements.survey_all if command.with_messages else session.statements.survey
    values = {
        "limit": command.limit,
        "newest": command.newest,
        "since": _END if command.since is None else by.written_time(command.since),
    }
    (row,) = session.run(by.counted(query), [values[name] for name in query.parameters])
    now, scope, key, made_at, free, newest, newest_since, complete, failed, made, is_partial, *gauges = row
    in_flight, stuck, parked, accepted, expired, *more = gauges
    return Surveyed(
        by.read_time(now),
        StoreSurveyed(in_flight, stuck, parked, accepted, min(expired, command.limit), *more),
        free,
        None if scope is None else (scope, key, by.read_time(made_at)),
        newest if newest < command.newest else None,
        newest,
        None if newest_since is None else by.read_time(newest_since),
        complete,
        failed,
        made,
        bool(is_partial),
    )
