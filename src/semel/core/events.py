"""Events for operators, as values: all that Semel tells of itself. Who is told, and how, is in ``telemetry/``.

``Happening`` is the extraordinary, and is logged; ``Measure`` is the ordinary, and is counted. A key appears here only
as its short digest: keys can hold personal data.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from semel.core.outcome import Door, Ended, Outcome, RetryReason
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
    """The handler ran, and its answer could not be stored yet. The worker keeps answer and key, and tries again."""

    key: str
    attempt: int
    reason: str


@value
class NotLoggedIn:
    """A worker ran a request, and the app refused it: its login must take the user from `semel.principal`."""

    key: str
    attempt: int
    status: int


@value
class StoredLate:
    """An answer that the worker had kept is stored now: the store takes it again. Retries get it."""

    key: str
    attempt: int


@value
class AnswerLost:
    """An answer that could not be stored was given up. A retry may run the operation again."""

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
    """A request (by 503) or a call (by an exception) was refused, because the store failed."""

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

    #: Not for the log: a path may name a person.
    unlogged: ClassVar[frozenset[str]] = frozenset({"route"})

    key: str | None
    outcome: Outcome
    #: Its method and its path, with ``*`` for what looks like an id.
    route: str
    #: The template of its route, where that is known.
    endpoint: str | None = None


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
    | NotLoggedIn
    | StoredLate
    | AnswerLost
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


@value
class Stretch:
    """A part of a request's time."""

    #: Seconds from the request's beginning to this one's.
    after: float
    seconds: float


@value
class RequestEnded:
    """A request to something guarded has ended. Its answer is on its way."""

    outcome: Ended
    #: The route's template, such as ``POST /orders/{id}``; ``other`` where there is none, or there are too many.
    endpoint: str
    door: Door
    #: The digest of its key; None: it has none.
    key: str | None
    attempt: int | None
    #: From the guard's first step to its last.
    seconds: float
    claim: Stretch | None = None
    handler: Stretch | None = None
    #: Storing the answer; in atomic mode, COMMIT.
    store: Stretch | None = None
    #: The trace that the request is part of, as W3C's traceparent; None: it is not traced.
    trace: str | None = None
    #: The trace of the attempt that it came upon: the one that ran the handler, or still does.
    found: str | None = None


@value
class WaitBegan:
    """A duplicate begins to wait for the first request to end."""


@value
class WaitEnded:
    """A duplicate waits no longer."""


@value
class MessageEnded:
    """A delivery to an inbox has ended."""

    consumer: str
    outcome: Literal["ran", "duplicate", "busy", "parked", "reused", "failed"]


@value
class Relayed:
    """A relay has sent what there was."""

    to: str
    published: int
    #: To be tried again.
    failed: int
    #: Dead letters.
    dead: int
    #: Sent, but the lease had run out: another relay may have sent them as well.
    fenced: int


@value
class Reaped:
    """The reaper has cleared what was past retention."""

    deleted: int
    stripped: int
    abandoned: int


@value
class ClientRetried:
    """A client of Semel's sends a request again."""

    reason: RetryReason


@value
class StoreSurveyed:
    """What is in a store at one moment. Counts end at a limit; None: this store can't tell."""

    in_flight: int | None
    stuck: int | None
    parked: int | None
    #: Accepted, and not begun.
    accepted: int | None
    #: Past retention, and not cleared yet.
    expired: int | None
    #: Ages in seconds; 0 where there is nothing.
    oldest_in_flight: float | None
    oldest_accepted: float | None
    outbox_pending: int | None = None
    outbox_oldest: float | None = None
    outbox_dead: int | None = None
    inbox_parked: int | None = None


Measure = RequestEnded | WaitBegan | WaitEnded | MessageEnded | Relayed | Reaped | ClientRetried | StoreSurveyed
"""What is ordinary. It is counted where a sink was asked for, and made only then."""

Event = Happening | Measure
"""All that a sink may be told."""
