"""The reference store: the shortest program that keeps every promise of ``base.py``, in one process's memory.

For tests and for reading. It shares nothing between processes and forgets everything when this one ends.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, TypeVar

from semel.core.commands import (
    Again,
    Browse,
    Claim,
    Command,
    Complete,
    Look,
    Now,
    Release,
    Renew,
    TakeOver,
    Verdict,
)
from semel.core.message import Answer
from semel.core.record import NOBODYS_TOKEN, Found, Hold, Record
from semel.core.state import TERMINAL, Event, State, after
from semel.stores.base import AsyncStore, Store
from semel.stores.step import Step

T = TypeVar("T")
Clock = Callable[[], datetime]


def _system_clock() -> datetime:
    # This process is the whole of the database, so its clock is the database's.
    return datetime.now(UTC)  # noqa: TID251 - see above


@dataclass(frozen=True, slots=True)
class _Row:
    state: State
    attempt: int
    token: bytes
    fingerprint: bytes
    created_at: datetime
    expires_at: datetime
    lease_expires_at: datetime | None
    completed_at: datetime | None = None
    answer: Answer | None = None


class MemoryStore(Store):
    """Records in a dictionary, under one lock."""

    def __init__(self, _url: str = "memory://", *, clock: Clock = _system_clock) -> None:
        """Start empty. Tests give a *clock* they can move."""
        self._clock = clock
        self._lock = threading.Lock()
        self._rows: dict[tuple[str, str], _Row] = {}
        self._perform: dict[type[Command[Any]], Callable[[Any, datetime], Any]] = {
            Claim: self._claim,
            TakeOver: self._take_over,
            Complete: self._complete,
            Release: self._release,
            Renew: self._renew,
            Look: self._look,
            Browse: self._browse,
            Now: lambda _, now: now,
        }

    def perform(self, command: Command[T]) -> T:
        """Carry out one store command."""
        with self._lock:
            return self._perform[type(command)](command, self._clock())  # type: ignore[no-any-return]  # by the table

    def open(self) -> None:
        """There is nothing to open."""

    def migrate(self) -> list[str]:
        """There is no schema."""
        return []

    def close(self) -> None:
        """There is nothing to let go of."""

    def _claim(self, claim: Claim, now: datetime) -> Hold | Found:
        row = self._rows.get((claim.scope, claim.key))
        if row is not None:
            return Found(
                row.state,
                row.attempt,
                row.token,
                row.fingerprint,
                row.answer,
                lease_is_over=row.lease_expires_at is None or row.lease_expires_at <= now,
                is_expired=row.expires_at <= now,
            )
        return self._begin(claim, attempt=1, event=Event.CLAIM, state=None, now=now)

    def _begin(self, claim: Claim, *, attempt: int, event: Event, state: State | None, now: datetime) -> Hold:
        self._rows[claim.scope, claim.key] = _Row(
            state=_must(after(state, event)),
            attempt=attempt,
            token=claim.token,
            fingerprint=claim.fingerprint,
            created_at=now,
            expires_at=now + claim.retention,
            lease_expires_at=now + claim.lease,
        )
        return Hold(claim.scope, claim.key, attempt, claim.token)

    def _take_over(self, command: TakeOver, now: datetime) -> Hold | Again:
        claim, seen = command.claim, command.seen
        row = self._rows.get((claim.scope, claim.key))
        if row is None or (row.attempt, row.token) != (seen.attempt, seen.token):
            return Again.AGAIN
        is_expired = row.expires_at <= now
        is_free = is_expired if row.state in TERMINAL else _must(row.lease_expires_at) <= now
        if not is_free:
            return Again.AGAIN
        attempt = 1 if is_expired else row.attempt + 1
        hold = self._begin(claim, attempt=attempt, event=Event.TAKE_OVER, state=row.state, now=now)
        if not is_expired:
            # It is still the same operation: it keeps its first sight and what it was a claim to.
            self._update(hold, created_at=row.created_at, expires_at=row.expires_at, fingerprint=row.fingerprint)
        return hold

    def _complete(self, command: Complete, now: datetime) -> Verdict:
        hold = command.hold
        row = self._rows.get((hold.scope, hold.key))
        if row is None or (row.attempt, row.token) != (hold.attempt, hold.token):
            return Verdict.FENCED
        if row.state not in TERMINAL:
            state = after(row.state, command.event)
            self._update(hold, state=state, answer=command.answer, completed_at=now, lease_expires_at=None)
        return Verdict.DONE

    def _release(self, command: Release, now: datetime) -> Verdict:
        hold = command.hold
        row = self._rows.get((hold.scope, hold.key))
        if row is None:
            return Verdict.DONE
        if row.token != hold.token or hold.attempt not in {0, row.attempt} or row.state in TERMINAL:
            return Verdict.FENCED
        if row.attempt > 1:
            state = after(row.state, Event.GIVE_UP)
            self._update(hold, state=state, token=NOBODYS_TOKEN, lease_expires_at=now)
        elif after(row.state, Event.RELEASE) is None:
            del self._rows[hold.scope, hold.key]
        return Verdict.DONE

    def _renew(self, command: Renew, now: datetime) -> frozenset[Hold]:
        lost = set()
        for hold, lease in command.holds:
            row = self._rows.get((hold.scope, hold.key))
            if row is None or (row.attempt, row.token) != (hold.attempt, hold.token) or row.state in TERMINAL:
                lost.add(hold)
            else:
                self._update(hold, state=after(row.state, Event.RENEW), lease_expires_at=now + lease)
        return frozenset(lost)

    def _look(self, command: Look, now: datetime) -> Record | None:
        row = self._rows.get((command.scope, command.key))
        return None if row is None else _record(command.scope, command.key, row, now)

    def _browse(self, command: Browse, now: datetime) -> tuple[Record, ...]:
        found = [
            _record(scope, key, _without_body(row), now)
            for (scope, key), row in reversed(self._rows.items())
            if command.key in {None, key} and command.scope in {None, scope} and command.state in {None, row.state}
        ]
        found.sort(key=lambda record: record.created_at, reverse=True)
        return tuple(found[: command.limit])

    def _update(self, hold: Hold, **changes: Any) -> None:
        self._rows[hold.scope, hold.key] = replace(self._rows[hold.scope, hold.key], **changes)


class AsyncMemoryStore(AsyncStore):
    """The same, for an event loop: nothing ever waits."""

    def __init__(self, _url: str = "memory://", *, memory: MemoryStore | None = None) -> None:
        """Use the records of *memory*, or start empty."""
        self._memory = memory or MemoryStore()

    def perform(self, command: Command[T]) -> Step[T]:
        """Carry out one store command."""
        answer = Step[T](loop=asyncio.get_running_loop())
        answer.settle(self._memory.perform(command))
        return answer

    async def open(self) -> None:
        """There is nothing to open."""

    async def close(self) -> None:
        """There is nothing to let go of."""


def _without_body(row: _Row) -> _Row:
    if row.answer is None or row.answer.is_tombstone:
        return row
    return replace(row, answer=replace(row.answer, body=b""))


def _record(scope: str, key: str, row: _Row, now: datetime) -> Record:
    return Record(
        scope=scope,
        key=key,
        state=row.state,
        attempt=row.attempt,
        token=row.token,
        fingerprint=row.fingerprint,
        recovery_point=None,
        answer=row.answer,
        created_at=row.created_at,
        lease_expires_at=row.lease_expires_at,
        completed_at=row.completed_at,
        expires_at=row.expires_at,
        lease_left=None if row.lease_expires_at is None else row.lease_expires_at - now,
        retention_left=row.expires_at - now,
    )


def _must(value: T | None) -> T:
    if value is None:  # pragma: no cover - the state table and the row's own invariants rule it out
        raise AssertionError
    return value
