"""The statements of ``queries.sql`` ready to run, and rows turned into records and back. Nothing here runs one.

Parameters are tuples in the order in which the file names them: on this path a dictionary for each row costs time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

from semel.core import recovery
from semel.core.commands import Begin, Claim, Commit, Complete, Finish, TakeOver, Verdict
from semel.core.message import Answer
from semel.core.record import Entry, Found, Hold, Record, Stuck
from semel.core.recovery import Progress
from semel.core.state import TERMINAL, Event, State, after
from semel.stores import milestones, requests
from semel.stores.dialect import SQLITE, Dialect
from semel.stores.headers import read_back, written
from semel.stores.statement import Joined, Names, Query, load_queries
from semel.stores.transaction import Begun

T = TypeVar("T")

PACKAGE = "semel.stores.sqlite"

#: Rows of one statement. Each size has its own text, which stays prepared.
MAX_ROWS = 128
#: Collecting rows for an UPDATE takes SQLite as long as five single updates.
MIN_GATHERED = 8

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)
_ROWS = re.compile(r"(?<=VALUES )\((?:[^()]|\n)*\)")
_STATES = {state.value: state for state in State}
#: The final state of a record, and its name in the audit trail.
ENDINGS = {event: str(after(State.PROCESSING, event)) for event in (Event.COMPLETE, Event.FAIL)}
ENDED = {Event.COMPLETE: "completed", Event.FAIL: "failed"}


class Statements:
    """Every statement of the store, for one table."""

    def __init__(self, names: Names) -> None:
        """Read them from the file."""
        self.names = names
        queries = load_queries(PACKAGE, names)
        self.find_all = Bulk(queries["find_all"])
        self.claim = Bulk(queries["claim"], TERMS)
        self.complete = Bulk(queries["complete"], ("now",))
        self.renew = Bulk(queries["renew"], ("now",))
        self.write_down = Bulk(queries["write_down"], ("now", "actor"))
        self.delete_due = Bulk(queries["delete_due"])
        self.strip_due = Bulk(queries["strip_due"])
        self.fail_due = Bulk(queries["fail_due"], ("status", "headers", "body"))
        self.find = _marked(queries["find"])
        self.complete_one = _marked(queries["complete_one"])
        self.renew_one = _marked(queries["renew_one"])
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
        self.walk = _marked(queries["walk"])
        self.walk_unfinished = _marked(queries["walk_unfinished"])
        self.walk_scope = _marked(queries["walk_scope"])
        self.search = queries["search"]
        self.keys_after = _marked(queries["keys_after"])
        self.find_stuck = _marked(queries["find_stuck"])
        self.counts = {name: _marked(queries[f"{name}_counts"]) for name in ("add", "delete", "read")}
        self.survey, self.survey_all = queries["survey"].with_parts(), queries["survey"].with_parts("messages")
        self.read_request = _marked(queries["read_request"])
        self.sweep = _marked(queries["sweep"])
        self.find_due = _marked(queries["find_due"])
        self.erasing = {name: _marked(queries[name]) for name in ("walk_owner", "erase", "walk_lines", "erase_lines")}
        self.discard = _marked(queries["discard"])
        self.unpark = _marked(queries["unpark"])
        self.resolve = _marked(queries["resolve"])
        self.read_trail = _marked(queries["read_trail"])
        self.reap_trail = _marked(queries["reap_trail"])
        self.reap_inbox = _marked(queries["reap_inbox"])
        self.now = _marked(queries["now"])
        self.applied = _marked(queries["applied"])
        self.write_nothing = _marked(queries["write_nothing"])
        self.apply = _marked(queries["apply"])
        # These join the application's transactions, and keep the names of their parameters.
        self.find_inside = queries["find"]
        self.finish = queries["finish"]
        self.save_inside = queries["save"]
        self.write_down_inside = queries["write_down_inside"]


class Bulk:
    """A statement over many rows, in one text for each power of two: few enough for all of them to stay prepared.

    One statement for 64 rows is not only less work than 64: Python releases the GIL for each, and next to a busy event
    loop may wait 5 ms to get it back. So measured, 64 claims and answers took 197 ms one by one, and 18 ms this way.
    """

    def __init__(self, query: Query, shared: Sequence[str] = ()) -> None:
        """Repeat the row of the VALUES list of *query*. The parameters *shared* are the same for all rows, and are
        passed once, before those of the rows; so they come first in the text, too.
        """
        numbers = {name: f"?{number}" for number, name in enumerate(shared, 1)}
        text = re.sub(r":([a-z_]+)\b", lambda match: numbers.get(match[1], "?"), query.text)
        row = _ROWS.findall(text)[0]
        sizes = [1 << power for power in range(MAX_ROWS.bit_length())]
        self._texts = {size: text.replace(row, ", ".join([row] * size), 1) for size in sizes}

    def of(self, size: int) -> str:
        """Return the statement for as many rows, a power of two."""
        return self._texts[size]


def chunks(items: Sequence[T], least: int = 1) -> Iterator[Sequence[T]]:
    """Cut *items* into powers of two: 100 are 64, 32 and 4. A rest smaller than *least* goes one by one."""
    start = 0
    while left := len(items) - start:
        size = min(1 << (left.bit_length() - 1), MAX_ROWS)
        if size < least:
            size = 1
        yield items[start : start + size]
        start += size


#: What claims under one policy share, in the order of ``claim_terms``.
TERMS = ("state", "now", "lease_expires_at", "expires_at", "on_crash", "after_retention", "accepted")


def claim_terms(claim: Claim, now: int) -> tuple[Any, ...]:
    """Return what a claim made *now* has in common with others under its policy.

    An accepted operation is pending, and has no lease. A key with a time in it that is not after now by
    the database's clock needs no tombstone: a late retry is refused by the key's age.
    """
    made_at, after_retention = claim.made_at, claim.after_retention
    if made_at is not None and after_retention == "strip" and written_time(made_at) <= now:
        after_retention = "delete"
    expires_at = now + milliseconds(claim.retention)
    if claim.is_accepted:
        return ("pending", now, None, expires_at, claim.on_crash, after_retention, 1)
    return ("processing", now, now + milliseconds(claim.lease), expires_at, claim.on_crash, after_retention, 0)


def claim_row(claim: Claim) -> tuple[Any, ...]:
    """Return the parameters that belong to this claim alone."""
    request = claim.request
    return (
        claim.scope,
        claim.key,
        claim.token,
        claim.fingerprint,
        requests.line_of(claim),
        claim.traceparent,
        None if request is None else requests.written(request),
        None if request is None else request.body,
    )


def take_over_row(command: TakeOver) -> tuple[Any, ...]:
    """Return the parameters of a take-over."""
    claim, seen = command.claim, command.seen
    scope, key, token, fingerprint, *request = claim_row(claim)
    return (
        token,
        fingerprint,
        milliseconds(claim.lease),
        milliseconds(claim.retention),
        claim.on_crash,
        claim.after_retention,
        *request,
        claim.is_accepted,
        claim.made_at and written_time(claim.made_at),
        command.is_abandoned,
        scope,
        key,
        seen.attempt,
        seen.token,
    )


def complete_row(command: Complete) -> tuple[Any, ...]:
    """Return the parameters of an ending."""
    answer, hold = command.answer, command.hold
    return (
        ENDINGS[command.event],
        answer.status,
        written(answer.headers),
        answer.body,
        hold.scope,
        hold.key,
        hold.attempt,
        hold.token,
    )


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
    return (milliseconds(lease), *hold_row(hold))


def read_found(row: Sequence[Any]) -> Found:
    """Read a row of ``find``."""
    (
        state,
        attempt,
        token,
        fingerprint,
        status,
        headers,
        body,
        lease_expires_at,
        expires_at,
        now,
        steps,
        accepted,
        *more,
    ) = row
    left = expires_at - now
    return Found(
        _STATES[state],
        attempt,
        token,
        fingerprint,
        _answer(status, headers, body),
        lease_expires_at is None or lease_expires_at <= now,
        left <= 0 and state != "unknown",
        steps,
        accepted == 1,
        left * _MILLISECOND,
        more[0],
    )


def is_answered(found: Found | None, hold: Hold) -> bool:
    """Whether *found* is an answer under *hold*: then a reply was lost, and storing it again changes nothing."""
    return found is not None and found.state in TERMINAL and (found.attempt, found.token) == (hold.attempt, hold.token)


def read_record(row: Sequence[Any]) -> Record:
    """Read a row of ``look`` or ``browse``."""
    scope, key, state, attempt, token, fingerprint, recovery_point, steps, status, headers, body, *more = row
    is_accepted, milestone, request_line, traceparent, *times = more
    created_at, lease_expires_at, completed_at, expires_at, lease_left, retention_left = times
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
        request_line=request_line or "",
        traceparent=traceparent,
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


class SQLiteJoins:
    """The statements that join the application's transaction. Its beginning and end are in ``transactions.py``."""

    def __init__(self, statements: Statements, actor: str | None, *, is_full: bool = False) -> None:
        """Without an *actor* there is no audit trail; with *is_full*, it has every change."""
        self.dialect = Dialect(SQLITE, statements.names, has_trail=actor is not None)
        self._statements = statements
        self._actor = actor
        self._is_full = is_full
        self.has_questions = False

    def questions(self) -> tuple[()]:
        """Return nothing: of which version a file is was seen when it was opened."""
        return ()

    def opening(self, command: Begin) -> None:  # noqa: ARG002 - PostgreSQL's concern
        """Return nothing: the write lock of the whole file is the key's lock, and a transaction begins with it."""
        return

    def probe(self, command: Begin) -> tuple[()]:  # noqa: ARG002 - PostgreSQL's concern
        """Return nothing: the snapshot is taken under the write lock."""
        return ()

    def begin(self, command: Begin) -> Joined[Begun]:
        """Read what is there."""
        claim = command.claim

        def read(rows: Sequence[Sequence[Any]]) -> Begun:
            return Begun(read_found(rows[0]) if rows else Hold(claim.scope, claim.key, 1, claim.token))

        return Joined(self._statements.find_inside, {"scope": claim.scope, "key": claim.key}, read)

    def finish(self, command: Finish) -> Joined[Verdict]:
        """Write the finished record, if the record is still the one that was seen."""
        claim, hold, answer, seen = command.claim, command.hold, command.answer, command.seen
        parameters = _mine(hold) | {
            "state": ENDINGS[command.event],
            "fingerprint": claim.fingerprint,
            "request_line": requests.line_of(claim),
            "traceparent": claim.traceparent,
            "on_crash": claim.on_crash,
            "after_retention": claim.after_retention,
            "made_at": claim.made_at and written_time(claim.made_at),
            "retention": milliseconds(claim.retention),
            "status": answer.status,
            "headers": written(answer.headers),
            "body": answer.body,
            # NULL equals nothing: if no record was seen, there must be none.
            "seen_attempt": None if seen is None else seen.attempt,
            "seen_token": None if seen is None else seen.token,
        }
        line = None
        if self._is_full:
            line = self._line(hold, ENDED[command.event], None)
        elif hold.attempt > 1:
            line = self._line(hold, "taken over", None)
        return Joined(self._statements.finish, parameters, _verdict, line)

    def commit(self, command: Commit) -> Joined[Verdict]:
        """Write the operation's steps, if its hold is live."""
        hold, progress = command.hold, command.progress
        steps = {
            "steps": recovery.written(progress),
            "recovery_point": progress.recovery_point,
            "before": recovery.written(command.before),
        }
        line = self._line(hold, "saved", recovery.change(command.before, progress))
        return Joined(self._statements.save_inside, _mine(hold) | steps, _verdict, line)

    def _line(self, hold: Hold, event: str, detail: str | None) -> Joined[None] | None:
        if self._actor is None:
            return None
        parameters = {
            "scope": hold.scope,
            "key": hold.key,
            "attempt": hold.attempt,
            "event": event,
            "actor": self._actor,
            "detail": detail,
        }
        return Joined(self._statements.write_down_inside, parameters, lambda _: None)


def _mine(hold: Hold) -> dict[str, Any]:
    return {"scope": hold.scope, "key": hold.key, "attempt": hold.attempt, "token": hold.token}


def _verdict(rows: Sequence[Sequence[Any]]) -> Verdict:
    return Verdict.DONE if rows else Verdict.FENCED


def _answer(status: int | None, headers: str, body: bytes | None) -> Answer | None:
    return None if status is None else Answer(status, read_back(headers), body)


def _marked(query: Query) -> str:
    """Return the text with parameters spelled ``?``, for tuples; so no parameter may be named twice."""
    return re.sub(r"\$\d+", "?", query.numbered)


def counted(query: Query) -> str:
    """Return the text with parameters spelled ``?1``, in the order of ``query.parameters``; each may be named twice."""
    return query.numbered.replace("$", "?")
