"""Rows as outcomes: pure, and the same for every driver."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from semel.core.commands import Verdict
from semel.core.message import Answer
from semel.core.record import Found, Record
from semel.core.state import State
from semel.stores import milestones
from semel.stores.headers import read_back

Row = Sequence[Any]


def verdict(rows: Sequence[Row]) -> Verdict:
    """Read a write that returns a row when it was made."""
    return Verdict.DONE if rows else Verdict.FENCED


def found(row: Row) -> Found:
    """Read what a claim came upon."""
    state, attempt, token, fingerprint, status, headers, body, lease_is_over, left, steps, is_accepted, trace = row
    # Some drivers give a view of the bytes, which is not the same as they.
    kept = None if body is None else bytes(body)
    answer = None if status is None else Answer(status, read_back(headers), kept)
    return Found(
        State(state),
        attempt,
        bytes(token),
        bytes(fingerprint),
        answer,
        lease_is_over,
        left <= 0 and state != State.UNKNOWN,
        steps,
        is_accepted,
        timedelta(seconds=left),
        trace,
    )


def record(row: Row) -> Record:
    """Read a whole record."""
    scope, key, state, attempt, token, fingerprint, point, steps, status, headers, body, is_tombstone, *more = row
    is_accepted, milestone, request_line, trace, created_at, lease_expires_at, completed_at, expires_at, now = more
    answer = None if status is None else Answer(status, read_back(headers), None if is_tombstone else body)
    left: timedelta | None = lease_expires_at and lease_expires_at - now
    return Record(
        scope=scope,
        key=key,
        state=State(state),
        attempt=attempt,
        token=token,
        fingerprint=fingerprint,
        recovery_point=point,
        steps=steps,
        answer=answer,
        created_at=created_at,
        lease_expires_at=lease_expires_at,
        completed_at=completed_at,
        expires_at=expires_at,
        lease_left=left,
        retention_left=expires_at - now,
        is_accepted=is_accepted,
        milestone=milestones.read_back(milestone),
        request_line=request_line or "",
        traceparent=trace,
    )


def record_or_none(rows: Sequence[Row]) -> Record | None:
    """Read one record that may not be there."""
    return record(rows[0]) if rows else None
