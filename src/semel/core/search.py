"""Which records fit a filter, for stores that have no query language. Nothing is read here."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta

from semel.core.commands.search import Filter, Page, Search, Survey, Surveyed
from semel.core.events import StoreSurveyed
from semel.core.key import digest_of
from semel.core.place import read_place, written_place
from semel.core.record import Record
from semel.core.state import TERMINAL, State

#: Records of one scope that are found by its index and sorted, rather than by a walk along the age of all records.
FEW = 2000


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)

#: Reads the details of a record's audit trail.
Details = Callable[[Record], Iterable[str | None]]


def walk_of(command: Search) -> int:
    """Return how many records to walk past: without a filter each of them fits, and one more says if there are more."""
    return command.scan if command.wanted != Filter() else min(command.scan, command.limit + 2)


def page(command: Search, records: Iterable[Record], details: Details) -> Page:
    """Return the page of *records*, which are all that there are."""
    wanted = command.wanted
    walk = sorted((each for each in records if not (wanted.is_unfinished and each.state in TERMINAL)), key=_order)
    if command.after is not None:
        place = read_place(command.after)
        walk = [each for each in walk if _order(each) < place]
    walk.reverse()
    walked = walk[: command.scan]
    found = [each for each in walked if fits(wanted, each, details)]
    if len(found) > command.limit:
        found = found[: command.limit]
        return Page(tuple(found), written_place(*_order(found[-1])), len(walked))
    is_cut = len(walk) > command.scan
    return Page(tuple(found), written_place(*_order(walked[-1])) if is_cut else None, len(walked), is_cut)


def surveyed(command: Survey, records: Iterable[Record], now: datetime, expired: int) -> Surveyed:
    """Count *records*, which are all that there are; *expired* of them may be reaped."""
    walk = sorted(records, key=_order, reverse=True)
    newest = walk[: command.newest]
    kinds: defaultdict[str, list[Record]] = defaultdict(list)
    for each in walk:
        kinds[_kind(each)].append(each)
    counts = {kind: min(len(found), command.limit) for kind, found in kinds.items()}
    endings = Counter(each.state for each in newest)
    busy = kinds["in flight"][-1] if kinds["in flight"] else None
    return Surveyed(
        now,
        StoreSurveyed(
            in_flight=counts.get("in flight", 0),
            stuck=counts.get("stuck", 0),
            parked=counts.get("parked", 0),
            accepted=counts.get("accepted", 0),
            expired=min(expired, command.limit),
            oldest_in_flight=_age(kinds["in flight"], now),
            oldest_accepted=_age(kinds["accepted"], now),
        ),
        counts.get("free", 0),
        None if busy is None else (busy.scope, busy.key, busy.created_at),
        total=len(walk),
        newest=len(newest),
        newest_since=newest[-1].created_at if newest else None,
        complete=endings[State.COMPLETE],
        failed=endings[State.FAILED],
        made=0 if command.since is None else sum(each.created_at > command.since for each in newest),
    )


def _kind(record: Record) -> str:
    """Say in a word what a record waits for."""
    if record.state is not State.PROCESSING:
        return {State.PENDING: "accepted", State.UNKNOWN: "parked"}.get(record.state, "ended")
    if not record.is_stuck:
        return "in flight"
    return "free" if record.is_free else "stuck"


def _age(walk: list[Record], now: datetime) -> float:
    return (now - walk[-1].created_at).total_seconds() if walk else 0.0


def _order(record: Record) -> tuple[int, str, str]:
    return (record.created_at - _EPOCH) // _MICROSECOND, record.scope, record.key


def fits(wanted: Filter, record: Record, details: Details) -> bool:
    """Whether *record* fits; *details* is asked only if all else does."""
    return (
        wanted.scope in {None, record.scope}
        and wanted.key in {None, record.key}
        and wanted.state in {None, record.state}
        and (record.is_stuck or not wanted.is_stuck)
        and (wanted.endpoint or "") in record.request_line
        and _has_age(wanted, record.read_at - record.created_at)
        and _has_status(wanted, record)
        and (wanted.digest is None or digest_of(record.key).startswith(wanted.digest))
        and (wanted.reason is None or any(wanted.reason in (each or "") for each in details(record)))
    )


def _has_age(wanted: Filter, age: timedelta) -> bool:
    is_young = wanted.newer_than is None or age <= wanted.newer_than
    return is_young and (wanted.older_than is None or age >= wanted.older_than)


def _has_status(wanted: Filter, record: Record) -> bool:
    if wanted.status is None:
        return True
    return record.answer is not None and wanted.status[0] <= record.answer.status <= wanted.status[1]
