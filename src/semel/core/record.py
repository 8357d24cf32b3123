"""One stored key: its fields and the invariants between them. How a database stores them is in ``stores/``."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any, Literal

from semel.core.message import Answer
from semel.core.state import TERMINAL, State
from semel.core.value import value
from semel.errors import ConfigurationError

#: What a retry gets after a worker died during the handler.
OnCrash = Literal["rerun", "refuse"]
#: What the reaper leaves of a record: nothing; a tombstone without its answer; all of it (it is a tombstone already).
AfterRetention = Literal["delete", "strip", "keep"]


#: Characters: one line below a progress bar.
MAX_NOTE_LENGTH = 200


@value
class Hold:
    """The right to write to one record: the attempt's number and its random token.

    A counter alone is not enough: a fail-over that loses a commit gives the next worker the same number.
    """

    scope: str
    key: str
    attempt: int
    token: bytes


#: The token of a record without a holder: no attempt makes this one.
NO_TOKEN = bytes(16)


@value
class Found:
    """What a claim found: the parts of the record that decide, with times already compared by the database."""

    state: State
    attempt: int
    token: bytes
    fingerprint: bytes
    answer: Answer | None
    #: No worker holds it any more: the lease has run out (or there is none, since the record is terminal or parked).
    lease_is_over: bool
    #: Past its retention. An unknown record never is.
    is_expired: bool
    #: How far it has come, as ``recovery`` writes it; None when no step was recorded.
    steps: str | None = None
    #: It was accepted, and only a worker may run it.
    is_accepted: bool = False
    #: How long its answer will be kept, by the database's clock; None if that is not needed.
    retention_left: timedelta | None = None
    #: The trace of the attempt that ran, or runs, the handler, where it was traced.
    traceparent: str | None = None

    @property
    def may_be_taken(self) -> bool:
        """Whether another worker may take the key: its lease has run out, or the record is past its retention.

        A parked record is never taken over by time: an operator has to resolve it.
        """
        if self.state is State.PROCESSING:
            return self.lease_is_over
        return self.is_expired and self.state is not State.UNKNOWN


@value
class Milestone:
    """How far an operation is, as its handler reports it."""

    #: Between 0 and 1.
    fraction: float
    note: str | None = None

    def __post_init__(self) -> None:
        """Refuse a fraction or a note that a progress bar can't show."""
        fraction: Any = self.fraction
        note: Any = self.note
        if not isinstance(fraction, int | float) or isinstance(fraction, bool) or not 0 <= fraction <= 1:
            raise ConfigurationError(f"progress must be a number between 0 and 1, not {fraction!r}.")
        if note is not None and (not isinstance(note, str) or len(note) > MAX_NOTE_LENGTH):
            raise ConfigurationError(f"The note of a progress must be a text of at most {MAX_NOTE_LENGTH} characters.")


@value
class Record:
    """A whole record."""

    scope: str
    key: str
    state: State
    attempt: int
    token: bytes
    fingerprint: bytes
    recovery_point: str | None
    #: How far it has come, as ``recovery`` writes it; None when no step was recorded.
    steps: str | None
    answer: Answer | None
    created_at: datetime
    lease_expires_at: datetime | None
    completed_at: datetime | None
    expires_at: datetime
    #: By the database's clock, when the record was read. Negative if the lease is over.
    lease_left: timedelta | None
    retention_left: timedelta
    #: It was accepted, and only a worker may run it.
    is_accepted: bool = False
    milestone: Milestone | None = None
    #: Method and path of the request that made it; empty if they are not known.
    request_line: str = ""
    #: The trace of the attempt that ran the handler, where it was traced. Lists may leave it out.
    traceparent: str | None = None

    def __post_init__(self) -> None:
        """Refuse a record that no store may hold; the schema's CHECK constraints say the same."""
        terminal = self.state in TERMINAL
        _require(self.attempt >= 1, "attempt counts from 1")
        _require(terminal == (self.answer is not None), "a terminal record has an answer, and no other has")
        _require(terminal == (self.completed_at is not None), "a terminal record says when it ended")
        _require((self.state is State.PROCESSING) == (self.lease_expires_at is not None), "processing has a lease")
        _require(self.is_accepted or self.state is not State.PENDING, "what is pending was accepted")

    @property
    def read_at(self) -> datetime:
        """When it was read, by the database's clock: the only one that its times can be compared with."""
        return self.expires_at - self.retention_left

    @property
    def is_expired(self) -> bool:
        """Whether it is past its retention by the database's clock. An unknown record waits for an operator instead."""
        return self.retention_left <= timedelta(0) and self.state is not State.UNKNOWN

    @property
    def is_stuck(self) -> bool:
        """Whether it is in progress under a lease that has run out."""
        return self.lease_left is not None and self.lease_left <= timedelta(0)

    @property
    def is_free(self) -> bool:
        """Whether it was given back half-way: its steps are kept, and the next retry or worker goes on."""
        return self.is_stuck and self.token == NO_TOKEN


@value
class Stuck:
    """A record that has not ended and that no worker works on: the sweeper and the completer decide about it.

    Its worker's lease has run out, or no worker has begun it yet (it is pending).
    """

    hold: Hold
    on_crash: OnCrash
    steps: str | None
    #: Whether the request was stored, so that it can be run again without its client.
    has_request: bool
    #: How long ago the lease ran out, by the database's clock; for a pending record, how long ago it was accepted.
    silent_for: timedelta
    #: How often it was run without its client.
    tries: int = 0
    #: It was accepted: only a worker runs it, and no client will.
    is_accepted: bool = False

    @property
    def is_unheld(self) -> bool:
        """Whether its key was freed already."""
        return self.hold.token == NO_TOKEN

    @property
    def is_pending(self) -> bool:
        """Whether it was not begun yet: its next attempt is the first."""
        return self.is_accepted and self.tries == 0 and not self.is_unheld


@value
class Entry:
    """One line of the audit trail."""

    at: datetime
    scope: str
    key: str
    attempt: int
    #: A name of ``state.Event``, in the past tense.
    event: str
    #: The process, or the operator.
    actor: str
    detail: str | None


def _require(truth: bool, rule: str) -> None:  # noqa: FBT001 - reads as a sentence at the call
    if not truth:
        raise ValueError(rule)
