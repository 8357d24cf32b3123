"""What people search for and count, as PostgreSQL statements. It runs nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from semel.core.commands import Command, Filter, Page, Search, Survey, Surveyed
from semel.core.events import StoreSurveyed
from semel.core.place import read_place, written_place
from semel.core.record import Record
from semel.core.search import FEW, walk_of
from semel.core.state import State
from semel.stores.postgres.bounds import BEGINNING
from semel.stores.postgres.builder import Builder
from semel.stores.postgres.rows import Row, record
from semel.stores.statement import Statement

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
#: After every record; a key is not as long as this is late in the alphabet.
_FIRST = (datetime(9999, 1, 1, tzinfo=UTC), "", "")
#: Of the newest records, so many are looked at for what is in progress: milliseconds.
WINDOW = 5000


def search(builder: Builder, command: Search) -> Statement[Page]:
    """Read a page of the records that fit."""
    wanted = command.wanted
    at, scope, key = _FIRST if command.after is None else _place(command.after)
    lowest, highest = wanted.status or (None, None)
    scan = walk_of(command)

    def read(rows: Sequence[Row]) -> Page:
        return _page(command, rows)

    return builder.statement(
        _variant(wanted),
        read,
        scope=wanted.scope,
        key=wanted.key,
        digest=wanted.digest,
        state=wanted.state and str(wanted.state),
        stuck=wanted.is_stuck,
        upkeep="parked" if wanted.state is State.UNKNOWN else "open",
        upkeep_from=BEGINNING if wanted.state is State.UNKNOWN else builder.bounds.of("followed"),
        endpoint=wanted.endpoint,
        newer=_seconds(wanted.newer_than),
        older=_seconds(wanted.older_than),
        lowest=lowest,
        highest=highest,
        reason=wanted.reason,
        at=at,
        at_scope=scope,
        at_key=key,
        few=min(FEW, scan),
        scan=scan,
        limit=command.limit + 1,
    )


def _variant(wanted: Filter) -> str:
    if wanted.scope is not None and wanted.key is not None:
        return "search_one"
    if wanted.is_unfinished:
        return "search_unfinished"
    return "search" if wanted.scope is None else "search_scope"


def _seconds(duration: timedelta | None) -> float | None:
    return None if duration is None else duration.total_seconds()


def _place(text: str) -> tuple[datetime, str, str]:
    microseconds, scope, key = read_place(text)
    try:
        return _EPOCH + microseconds * _MICROSECOND, _stored(scope), _stored(key)
    except OverflowError:
        return _FIRST


def _stored(text: str) -> str:
    # PostgreSQL stores no NUL, and no half of a surrogate pair.
    return text.replace("\0", "").encode("utf-8", "replace").decode()


def _page(command: Search, rows: Sequence[Row]) -> Page:
    walked, *bound = rows[0][:4]
    found = tuple(record(row[4:]) for row in rows if row[4] is not None)
    if len(found) > command.limit:
        found = found[: command.limit]
        return Page(found, _written(found[-1]), walked)
    if bound[0] is None:
        return Page(found, None, walked)
    return Page(found, written_place((bound[0] - _EPOCH) // _MICROSECOND, *bound[1:]), walked, is_cut=True)


def _written(last: Record) -> str:
    return written_place((last.created_at - _EPOCH) // _MICROSECOND, last.scope, last.key)


def survey(builder: Builder, command: Survey) -> Statement[Surveyed]:
    """Count the records of each kind."""
    return builder.statement(
        "survey_all" if command.with_messages else "survey",
        _surveyed,
        limit=command.limit,
        newest=command.newest or WINDOW,
        since=_FIRST[0] if command.since is None else command.since,
    )


def _surveyed(rows: Sequence[Row]) -> Surveyed:
    now, scope, key, made_at, free, total, newest, newest_since, complete, failed, made, is_partial, *gauges = rows[0]
    return Surveyed(
        now,
        StoreSurveyed(*gauges),
        free,
        None if scope is None else (scope, key, made_at),
        total,
        newest,
        newest_since,
        complete,
        failed,
        made,
        is_partial,
    )


SEARCHING: dict[type[Command[Any]], Callable[[Builder, Any], Statement[Any]]] = {Search: search, Survey: survey}
