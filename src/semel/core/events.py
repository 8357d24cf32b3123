"""Events for operators, as values. How they are logged is in ``telemetry/``.

A key appears here only as its short digest: keys can hold personal data.
"""

from __future__ import annotations

from typing import Literal

from semel.core.outcome import Outcome
from semel.core.value import value


@value
class PersonalKey:
    """A client sent a key that looks like an e-mail address or a phone number. It works, but it is stored."""

    key: str


@value
class LargeWebhook:
    """A webhook was sent that is larger than Standard Webhooks advises. Logged once for each endpoint."""

    #: The endpoint's name.
    key: str
    payload_bytes: int


@value
class EndpointTurnedOff:
    """An endpoint gets no more webhooks; those for it wait. To go on: semel webhooks enable."""

    #: The endpoint's name.
    key: str
    reason: str


@value
class TookOver:
    """An earlier attempt died, lost its database or gave up. The next runs again, or on from the recovery point."""

    key: str
    attempt: int


@value
class Fenced:
    """This worker had lost its lease when it wanted to store its answer. The answer was discarded."""

    key: str
    attempt: int


@value
class NotStored:
    """The handler ran, and its answer could not be stored. The key stays taken until the lease runs out."""

    key: str
    attempt: int
    reason: str


@value
class NotKept:
    """The answer was too large or a stream: it is sent once, and not stored. A retry gets 409."""

    key: str
    status: int


@value
class StoreFailed:
    """A request was refused with 503, because the store failed."""

    key: str
    reason: str


@value
class LostLease:
    """This worker was silent for longer than its lease. Its handler was stopped: another may run the operation."""

    key: str
    attempt: int


@value
class ParkedUnknown:
    """The outcome of an effect is unknown, so the operation is parked: see semel keys list --state unknown."""

    key: str
    attempt: int
    step: str


@value
class Swept:
    """The worker of this key died. The key is free again: the next retry goes on."""

    key: str
    attempt: int
    silent_seconds: float


@value
class SweptUnknown:
    """The worker of this key died, and the policy forbids a second run. It is parked for an operator to resolve."""

    key: str
    attempt: int


@value
class FinishedAbandoned:
    """No client retried this operation, so it was finished without one."""

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
    """The completer ran this operation too often, and it did not end. It is parked for an operator to resolve."""

    key: str
    attempt: int


@value
class Reported:
    """Report mode: this request ran unchanged. Its outcome is what enforcing would have done."""

    key: str | None
    outcome: Outcome
    route: str


@value
class ReportFailed:
    """Report mode could not judge a request, which ran unchanged. This is logged once a minute at most."""

    key: str | None
    #: What failed: the store, or a function of the application (its scope function).
    fault: Literal["store", "application"]
    reason: str


@value
class MessageParked:
    """A message has failed too often. It is parked for an operator: see semel inbox list."""

    #: The message's id, as it is: operators look it up, and programs make it.
    key: str
    consumer: str
    attempts: int
    reason: str


@value
class MessageReused:
    """A message came under the id of another one, with another payload. It was not run."""

    #: As above.
    key: str
    consumer: str
    #: The digests of the payloads.
    stored: str
    received: str


@value
class TryNotCounted:
    """A message's handler failed, and the store could not count the try. The next delivery is tried all the same."""

    #: As above.
    key: str
    consumer: str
    reason: str


Happening = (
    PersonalKey
    | LargeWebhook
    | EndpointTurnedOff
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
    | MessageParked
    | MessageReused
    | TryNotCounted
)
