"""The statements of ``queries.sql`` ready to run, and rows turned into records and back. Nothing here runs one.

Parameters are tuples in the order in which the file names them: on this path a dictionary for each row is felt.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

from semel.core import recovery
from semel.core.commands import Claim, Complete, TakeOver
from semel.core.message import Answer
from semel.core.record import Entry, Found, Hold, Record, Stuck
from semel.core.recovery import Progress
from semel.core.state import TERMINAL, Event, State, after
from semel.stores import milestones, requests
from semel.stores.fair import MAX_BATCH
from semel.stores.headers import read_back, written
from semel.stores.statement import Names, Query, load_queries

T = TypeVar("T")

PACKAGE = "semel.stores.sqlite"

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)
_ROWS = re.compile(r"(?<=VALUES )\(.*?\)", re.DOTALL)
_STATES = {state.value: state for state in State}
#: The state that a record ends in.
ENDINGS = {event: str(after(State.PROCESSING, event)) for event in (Event.COMPLETE, Event.FAIL)}


class Statements:
    """Every statement of the store, for one table."""

    def __init__(self, names: Names) -> None:
        """Read them from the file."""
        queries = load_queries(PACKAGE, names)
        self.find = Bulk(queries["find"])
        self.claim = Bulk(queries["claim"])
        self.complete = Bulk(queries["complete"])
        self.renew = Bulk(queries["renew"])
        self.write_down = Bulk(queries["write_down"])
        self.delete_due = Bulk(queries["delete_due"])
        self.strip_due = Bulk(queries["strip_due"])
        self.fail_due = Bulk(queries["fail_due"])
        self.take_over = _marked(queries["take_over"])
        self.release = _marked(queries["release"])
        self.give_up = _marked(queries["give_up"])
        self.exists = _marked(queries["exists"])
        self.save = _marked(queries["save"])
        self.mark = _marked(queries["mark"])
        self.park = _marked(queries["park"])
        self.is_parked = _marked(queries["is_parked"])
        self.look = _marked(queries["look"])
        self.browse = _marked(queries["browse"])
        self.keys_after = _marked(queries["keys_after"])
        self.find_stuck = _marked(queries["find_stuck"])
        self.read_request = _marked(queries["read_request"])
        self.sweep = _marked(queries["sweep"])
        self.find_due = _marked(queries["find_due"])
        self.discard = _marked(queries["discard"])
        self.unpark = _marked(queries["unpark"])
        self.decree = _marked(queries["decree"])
        self.read_trail = _marked(queries["read_trail"])
        self.reap_trail = _marked(queries["reap_trail"])
        self.now = _marked(queries["now"])
        self.applied = _marked(queries["applied"])
        self.write_nothing = _marked(queries["write_nothing"])
        self.apply = _marked(queries["apply"])
        # These join transactions of the application's, and keep the names of their parameters.
        self.begin = queries["begin"]
        self.finish = queries["finish"]
        self.save_inside = queries["save"]
        self.write_down_inside = queries["write_down_inside"]


class Bulk:
    """A statement over many rows, in one text for each power of two: few enough for all of them to stay prepared.

    One statement for 64 rows is not only less work than 64: Python gives the GIL away for each, and beside a busy event
    loop may wait 5 ms to get it back. Measured so, 64 claims and answers took 197 ms one by one, and 18 ms this way.
    """

    def __init__(self, query: Query) -> None:
        """Repeat the row of the VALUES list of *query*."""
        text = _marked(query)
        row = _ROWS.findall(text)[0]
        sizes = [1 << power for power in range(MAX_BATCH.bit_length())]
        self._texts = {size: _ROWS.sub(", ".join([row] * size), text) for size in sizes}

    def of(self, size: int) -> str:
        """Return the statement for as many rows, a power of two."""
        return self._texts[size]


def chunks(items: Sequence[T]) -> Iterator[Sequence[T]]:
    """Cut *items* into powers of two: 100 are 64, 32 and 4."""
    start = 0
    while left := len(items) - start:
        size = min(1 << (left.bit_length() - 1), MAX_BATCH)
        yield items[start : start + size]
        start += size


def claim_row(claim: Claim) -> tuple[Any, ...]:
    """Return the parameters of a claim."""
    request = claim.request
    return (
        claim.scope,
        claim.key,
        claim.token,
        claim.fingerprint,
        milliseconds(claim.lease),
        milliseconds(claim.retention),
        claim.on_crash,
        claim.after_retention,
        None if request is None else requests.written(request),
        None if request is None else request.body,
        claim.is_accepted,
        claim.made_at and written_time(claim.made_at),
    )


def take_over_row(command: TakeOver) -> tuple[Any, ...]:
    """Return the parameters of a take-over."""
    scope, key, *mine = claim_row(command.claim)
    return (*mine, command.is_abandoned, scope, key, command.seen.attempt, command.seen.token)


def complete_row(command: Complete) -> tuple[Any, ...]:
    """Return the parameters of an ending."""
    return (ENDINGS[command.event], *answer_row(command.answer), *hold_row(command.hold))


def answer_row(answer: Answer) -> tuple[Any, ...]:
    """Return the parameters of an answer."""
    return (answer.status, written(answer.headers), answer.body)


def hold_row(hold: Hold) -> tuple[Any, ...]:
    """Return the parameters of a write that only the holder may make."""
    return (hold.scope, hold.key, hold.attempt, hold.token)


def progress_row(progress: Progress) -> tuple[Any, ...]:
    """Return the parameters of the steps so far."""
    return (recovery.written(progress), progress.recovery_point)


def renew_row(hold: Hold, lease: timedelta) -> tuple[Any, ...]:
    """Return the parameters of a renewal."""
    return (*hold_row(hold), milliseconds(lease))


def read_found(row: Sequence[Any]) -> Found:
    """Read a row of ``find`` or ``begin``."""
    _, state, attempt, token, fingerprint, status, headers, body, lease_is_over, left, steps, is_accepted = row
    return Found(
        _STATES[state],
        attempt,
        token,
        fingerprint,
        _answer(status, headers, body),
        lease_is_over == 1,
        left <= 0 and state != State.UNKNOWN,
        steps,
        is_accepted == 1,
        left * _MILLISECOND,
    )


def is_answered(found: Found | None, hold: Hold) -> bool:
    """Whether an answer under *hold* is what was found: then a reply was lost, and storing it again changes nothing."""
    return found is not None and found.state in TERMINAL and (found.attempt, found.token) == (hold.attempt, hold.token)


def read_record(row: Sequence[Any]) -> Record:
    """Read a row of ``look`` or ``browse``."""
    scope, key, state, attempt, token, fingerprint, recovery_point, steps, status, headers, body, *more = row
    is_accepted, milestone, created_at, lease_expires_at, completed_at, expires_at, lease_left, retention_left = more
    return Record(
        scope=scope,
        key=key,
        state=_STATES[state],
        attempt=attempt,
        token=token,
        fingerprint=fingerprint,
        recovery_point=recovery_point,
        steps=steps,
        answer=_answer(status, headers, body),
        created_at=read_time(created_at),
        lease_expires_at=None if lease_expires_at is None else read_time(lease_expires_at),
        completed_at=None if completed_at is None else read_time(completed_at),
        expires_at=read_time(expires_at),
        lease_left=None if lease_left is None else lease_left * _MILLISECOND,
        retention_left=retention_left * _MILLISECOND,
        is_accepted=is_accepted == 1,
        milestone=milestones.read_back(milestone),
    )


def read_stuck(row: Sequence[Any]) -> Stuck:
    """Read a row of ``find_stuck``."""
    *hold, on_crash, steps, has_request, silent_for, tries, is_accepted = row
    return Stuck(Hold(*hold), on_crash, steps, has_request == 1, silent_for * _MILLISECOND, tries, is_accepted == 1)


def read_entry(row: Sequence[Any]) -> Entry:
    """Read a row of ``read_trail``."""
    at, *rest = row
    return Entry(read_time(at), *rest)


def read_time(count: int) -> datetime:
    """Read a time, in milliseconds since 1970."""
    return _EPOCH + count * _MILLISECOND


def written_time(time: datetime) -> int:
    """Return a time as it is stored."""
    return (time - _EPOCH) // _MILLISECOND


def milliseconds(duration: timedelta) -> int:
    """Return a duration as it is stored."""
    return duration // _MILLISECOND


def _answer(status: int | None, headers: str, body: bytes | None) -> Answer | None:
    return None if status is None else Answer(status, read_back(headers), body)


def _marked(query: Query) -> str:
    """Return the text with parameters spelled ``?``, as tuples want them; so no parameter may be named twice."""
    return re.sub(r"\$\d+", "?", query.numbered)
