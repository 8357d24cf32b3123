"""One stored key: its fields and the invariants between them. How a database spells them is in ``stores/``."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any, Literal

from semel.core.message import Answer
from semel.core.state import TERMINAL, State
from semel.core.value import value
from semel.errors import ConfigurationError

#: What a retry meets after a worker died in mid-handler.
OnCrash = Literal["rerun", "refuse"]
#: What the reaper leaves of a record: nothing; a tombstone without its answer; all of it (it was stripped before).
AfterRetention = Literal["delete", "strip", "keep"]


#: A line below a progress bar.
MAX_NOTE_LENGTH = 200


@value
class Hold:
    """The right to write to one record: which attempt, and that attempt's own random token.

    A counter alone is not enough: a fail-over that loses a commit gives the next worker the same number.
    """

    scope: str
    key: str
    attempt: int
    token: bytes


#: Of a record that its holder has given up: no attempt makes this one.
NOBODYS_TOKEN = bytes(16)


@value
class Found:
    """What a claim came upon: as much of the record as it takes to decide, times already judged by the database."""

    state: State
    attempt: int
    token: bytes
    fingerprint: bytes
    answer: Answer | None
    #: Nobody holds it any more: the lease has run out (or there is none, the record being terminal or parked).
    lease_is_over: bool
    #: Past its retention. What is unknown never is.
    is_expired: bool
    #: How far it has come, as ``recovery`` writes it; None when no step was recorded.
    steps: str | None = None
    #: It was accepted, to be run by a worker and by nobody else.
    is_accepted: bool = False
    #: How long its answer will be kept, by the database's clock; None where nobody needs to know.
    retention_left: timedelta | None = None

    @property
    def may_be_taken(self) -> bool:
        """Whether another may take the key: its worker's lease has run out, or the record is past its retention.

        One that is parked is never taken by time: an operator has to say what it did.
        """
        if self.state is State.PROCESSING:
            return self.lease_is_over
        return self.is_expired and self.state is not State.UNKNOWN


@value
class Milestone:
    """How far an operation is, in its handler's own words."""

    #: Between 0 and 1.
    fraction: float
    note: str | None = None

    def __post_init__(self) -> None:
        """Refuse what no progress bar can show."""
        fraction: Any = self.fraction
        note: Any = self.note
        if not isinstance(fraction, int | float) or isinstance(fraction, bool) or not 0 <= fraction <= 1:
            raise ConfigurationError(f"progress is a number between 0 and 1, not {fraction!r}.")
        if note is not None and (not isinstance(note, str) or len(note) > MAX_NOTE_LENGTH):
            raise ConfigurationError(f"The note of a progress is a text of at most {MAX_NOTE_LENGTH} characters.")


@value
class Record:
    """A whole record, as people look at it."""

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
    #: By the database's clock, when it was read. Negative when over.
    lease_left: timedelta | None
    retention_left: timedelta
    #: It was accepted, to be run by a worker and by nobody else.
    is_accepted: bool = False
    milestone: Milestone | None = None
    #: Such as "POST /payments", for people.
    request_line: str = ""

    def __post_init__(self) -> None:
        """Refuse a record that no store may hold; the schema's CHECK constraints say the same."""
        terminal = self.state in TERMINAL
        _require(self.attempt >= 1, "attempt counts from 1")
        _require(terminal == (self.answer is not None), "a terminal record has an answer, and no other has")
        _require(terminal == (self.completed_at is not None), "a terminal record says when it ended")
        _require((self.state is State.PROCESSING) == (self.lease_expires_at is not None), "processing has a lease")
        _require(self.is_accepted or self.state is not State.PENDING, "what is pending was accepted")

    @property
    def is_expired(self) -> bool:
        """Whether it is past its retention by the database's clock. What is unknown waits for a person instead."""
        return self.retention_left <= timedelta(0) and self.state is not State.UNKNOWN

    @property
    def is_stuck(self) -> bool:
        """Whether it is in progress under a lease that has run out."""
        return self.lease_left is not None and self.lease_left <= timedelta(0)


@value
class Stuck:
    """A record that nobody works on, though it has not ended: what the sweeper and the completer have to judge.

    Its worker is silent past its lease, or none has begun it yet (it is pending).
    """

    hold: Hold
    on_crash: OnCrash
    steps: str | None
    #: Whether the request was kept, so that it can be run again without its client.
    has_request: bool
    #: How long ago the lease ran out, by the database's clock; of a pending one, how long ago it was accepted.
    silent_for: timedelta
    #: How often it was run without its client.
    tries: int = 0
    #: It was accepted: a worker is to run it, and no client will.
    is_accepted: bool = False

    @property
    def is_nobodys(self) -> bool:
        """Whether its key was freed already."""
        return self.hold.token == NOBODYS_TOKEN

    @property
    def is_pending(self) -> bool:
        """Whether nobody has begun it yet: its next attempt is the first."""
        return self.is_accepted and self.tries == 0 and not self.is_nobodys


@value
class Entry:
    """One line of the audit trail."""

    at: datetime
    scope: str
    key: str
    attempt: int
    #: In the words of ``state.Event``, in the past tense.
    event: str
    #: The process, or the operator.
    actor: str
    detail: str | None


def _require(truth: bool, rule: str) -> None:  # noqa: FBT001 - reads as a sentence at the call
    if not truth:
        raise ValueError(rule)
