"""The records and their audit trail: what is stored, and how it is read. What changes it is in ``keys.py``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, TypeVar

from semel.core.commands import Claim
from semel.core.message import Answer, Request
from semel.core.record import NO_TOKEN, AfterRetention, Entry, Found, Hold, Milestone, OnCrash, Record
from semel.core.state import State
from semel.core.trail import FULL, NO_KEY, ORDINARY, Audit, reaped
from semel.core.value import value
from semel.stores.requests import line_of, read_back, written

T = TypeVar("T")
Clock = Callable[[], datetime]


@value
class Row:
    """One record."""

    state: State
    attempt: int
    token: bytes
    fingerprint: bytes
    created_at: datetime
    expires_at: datetime
    lease_expires_at: datetime | None
    on_crash: OnCrash
    after_retention: AfterRetention
    request: Request | None
    steps: str | None = None
    recovery_point: str | None = None
    completed_at: datetime | None = None
    answer: Answer | None = None
    tries: int = 0
    is_accepted: bool = False
    milestone: Milestone | None = None
    request_line: str = ""
    traceparent: str | None = None

    def is_expired(self, now: datetime) -> bool:
        """Whether it is past its retention. An unknown record never is."""
        return self.expires_at <= now and self.state is not State.UNKNOWN

    def lease_is_over(self, now: datetime) -> bool:
        """Whether no worker holds it any more."""
        return self.lease_expires_at is None or self.lease_expires_at <= now

    def may_be_taken(self, now: datetime) -> bool:
        """Whether another worker may take it: its lease is over, or it is past its retention."""
        return self.lease_is_over(now) if self.state is State.PROCESSING else self.is_expired(now)

    def found(self, now: datetime) -> Found:
        """What a claim sees of it."""
        return Found(
            self.state,
            self.attempt,
            self.token,
            self.fingerprint,
            self.answer,
            lease_is_over=self.lease_is_over(now),
            is_expired=self.is_expired(now),
            steps=self.steps,
            is_accepted=self.is_accepted,
            retention_left=self.expires_at - now,
            traceparent=self.traceparent,
        )

    def record(self, scope: str, key: str, now: datetime) -> Record:
        """The whole record."""
        return Record(
            scope=scope,
            key=key,
            state=self.state,
            attempt=self.attempt,
            token=self.token,
            fingerprint=self.fingerprint,
            recovery_point=self.recovery_point,
            steps=self.steps,
            answer=self.answer,
            created_at=self.created_at,
            lease_expires_at=self.lease_expires_at,
            completed_at=self.completed_at,
            expires_at=self.expires_at,
            lease_left=None if self.lease_expires_at is None else self.lease_expires_at - now,
            retention_left=self.expires_at - now,
            is_accepted=self.is_accepted,
            milestone=self.milestone,
            request_line=self.request_line,
            traceparent=self.traceparent,
        )

    def bare(self) -> Row:
        """The same as a tombstone without any content; one that has not ended as it is."""
        if self.answer is None:
            return self
        return replace(
            self,
            answer=Answer(self.answer.status, (), None),
            steps=None,
            recovery_point=None,
            milestone=None,
            request=None,
            request_line="",
            traceparent=None,
        )

    def without_body(self) -> Row:
        """The same without what lists do not show."""
        if self.answer is None or self.answer.is_tombstone:
            return self
        return replace(self, answer=replace(self.answer, body=b""))


@value
class Moment:
    """The time of a command, and its actor."""

    now: datetime
    actor: str


class Table:
    """Records by scope and key, and the lines of their trail. It takes no lock."""

    def __init__(self, audit: Audit) -> None:
        """Start empty. *audit* says how much the trail has."""
        self._rows: dict[tuple[str, str], Row] = {}
        #: The keys of open transactions in atomic mode, which have no records yet, and their fingerprints.
        self._running: dict[tuple[str, str], bytes] = {}
        self._trail: list[Entry] = []
        #: How many requests have ended how, by minute.
        self._counts: defaultdict[tuple[datetime, str], int] = defaultdict(int)
        self._audit = audit

    def _mine(self, hold: Hold, *states: State) -> Row | None:
        """The record, if it is one that *hold* may write to."""
        row = self._rows.get((hold.scope, hold.key))
        if row is None or (row.attempt, row.token) != (hold.attempt, hold.token) or row.state not in states:
            return None
        return row

    def _update(self, hold: Hold, **changes: Any) -> None:
        self._rows[hold.scope, hold.key] = replace(self._rows[hold.scope, hold.key], **changes)

    def _write_down(self, hold: Hold, event: str, moment: Moment, detail: str | None = None) -> None:
        """Write a line, if there is a trail and the record itself does not show the event."""
        if self._audit != "off" and (self._audit in FULL or event not in ORDINARY):
            self._append(hold, event, moment, detail)

    def _sum_up(self, deleted: int, stripped: int, moment: Moment) -> None:
        """Write one line for a batch of the reaper, if not every record has its own."""
        summary = reaped(deleted, stripped)
        if self._audit == "on" and summary is not None:
            self._append(Hold(NO_KEY, NO_KEY, 0, NO_TOKEN), "reaped", moment, summary)

    def _append(self, hold: Hold, event: str, moment: Moment, detail: str | None) -> None:
        self._trail.append(Entry(moment.now, hold.scope, hold.key, hold.attempt, event, moment.actor, detail))

    def _make_older(self, duration: timedelta) -> None:
        for place, row in self._rows.items():
            self._rows[place] = replace(
                row,
                created_at=row.created_at - duration,
                expires_at=row.expires_at - duration,
                lease_expires_at=row.lease_expires_at and row.lease_expires_at - duration,
                completed_at=row.completed_at and row.completed_at - duration,
            )
        self._trail = [replace(line, at=line.at - duration) for line in self._trail]


def new_row(claim: Claim, state: State, attempt: int, now: datetime) -> Row:
    """Return a record as *claim* makes it."""
    tells_its_age = claim.after_retention == "strip" and claim.made_at is not None and claim.made_at <= now
    return Row(
        state=state,
        attempt=attempt,
        token=claim.token,
        fingerprint=claim.fingerprint,
        created_at=now,
        expires_at=now + claim.retention,
        lease_expires_at=None if claim.is_accepted else now + claim.lease,
        on_crash=claim.on_crash,
        after_retention="delete" if tells_its_age else claim.after_retention,
        # As in every store: a retention of zero expires at once.
        request=claim.request and read_back(written(claim.request), claim.request.body),
        is_accepted=claim.is_accepted,
        request_line=line_of(claim) or "",
        traceparent=claim.traceparent,
    )


def must(value: T | None) -> T:
    """Return *value*, which is not None by the state table and the row's invariants."""
    if value is None:  # pragma: no cover - see above
        raise AssertionError
    return value
