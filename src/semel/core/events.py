"""What people may want to know of, as values. Who is told, and how, is in ``telemetry/``.

A key appears here only as its short digest: keys can hold personal data.
"""

from __future__ import annotations

from typing import Literal

from semel.core.outcome import Outcome
from semel.core.value import value


@value
class PersonalKey:
    """A client sent a key that looks like an e-mail address or a phone number. It works; it ends up in databases."""

    key: str


@value
class TookOver:
    """An earlier attempt died, lost its database or gave up; its operation is run again, or on from where it was."""

    key: str
    attempt: int


@value
class Fenced:
    """This worker had lost its lease when it wanted to store its answer. The answer was thrown away."""

    key: str
    attempt: int


@value
class NotStored:
    """The handler ran, and its answer could not be stored. The key is kept until the lease runs out."""

    key: str
    attempt: int
    reason: str


@value
class NotKept:
    """The answer was too large or a stream: it is sent once, and a retry will be told that it can't be repeated."""

    key: str
    status: int


@value
class StoreFailed:
    """A request was refused with 503, because the store could not do its part."""

    key: str
    reason: str


@value
class LostLease:
    """This worker was silent for longer than its lease, so its handler was stopped: another may run the operation."""

    key: str
    attempt: int


@value
class ParkedUnknown:
    """Nobody knows whether an effect happened, so the operation is parked: see semel keys list --state unknown."""

    key: str
    attempt: int
    step: str


@value
class Swept:
    """A worker died over this key. It is free again: the next retry goes on."""

    key: str
    attempt: int
    silent_seconds: float


@value
class SweptUnknown:
    """A worker died over this key, and its policy forbids a second run. It is parked for an operator to resolve."""

    key: str
    attempt: int


@value
class FinishedAbandoned:
    """No client came back for this operation, so it was finished without one."""

    key: str
    attempt: int
    status: int


@value
class FinishedAccepted:
    """An operation that was accepted was run, and has ended."""

    key: str
    attempt: int
    status: int


@value
class GaveUpAbandoned:
    """This operation was run to finish it, too often and to no end. It is parked for an operator to resolve."""

    key: str
    attempt: int


@value
class Reported:
    """Report mode: this request ran as it came. Its outcome is what enforcing would have made of it."""

    key: str | None
    outcome: Outcome
    route: str


@value
class ReportFailed:
    """Report mode could not judge a request, and it ran as it came. This is told once a minute at most."""

    key: str | None
    #: Whose fault it was: the store's, or that of what the application was asked (its scope function).
    whose: Literal["store", "application"]
    reason: str


Happening = (
    PersonalKey
    | TookOver
    | Fenced
    | NotStored
    | NotKept
    | StoreFailed
    | LostLease
    | ParkedUnknown
    | Swept
    | SweptUnknown
    | FinishedAbandoned
    | FinishedAccepted
    | GaveUpAbandoned
    | Reported
    | ReportFailed
)
