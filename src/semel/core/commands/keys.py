"""Commands about one key. Each is one round trip, or one transaction that the store owns; none is about upkeep."""

from __future__ import annotations

from dataclasses import field
from datetime import datetime, timedelta

from semel.core.commands.base import Again, Command, Verdict
from semel.core.message import Answer, Request
from semel.core.record import AfterRetention, Found, Hold, Milestone, OnCrash, Record
from semel.core.recovery import Progress
from semel.core.state import Event, State
from semel.core.value import value


@value
class Claim(Command[Hold | Found | Again]):
    """Take the key if it is free; otherwise return what is there.

    The caller makes the token: a record with this token belongs to this claim, even if the reply was lost.
    """

    scope: str
    key: str
    token: bytes
    fingerprint: bytes
    lease: timedelta
    retention: timedelta
    #: What a worker that finds the record stuck, or expired, has to know of its policy.
    on_crash: OnCrash = "rerun"
    after_retention: AfterRetention = "delete"
    #: Stored until the operation ends, so that it can be finished without its client.
    request: Request | None = None
    #: Whether it is only stored, as pending, with its request, for a worker to run. There is no lease yet.
    is_accepted: bool = False
    #: The time in the key, when it was made. If that is not after the store's own clock when the record is made, no
    #: tombstone is left ("strip" becomes "delete"): a retry past the retention is recognised by the age of its key.
    made_at: datetime | None = None
    #: Method and path of the request, such as "POST /payments", for operators; it decides nothing.
    #: At most 200 characters; empty where they are not known.
    request_line: str = ""
    #: The trace that the attempt is part of, as ``core/trace.py`` reads it; it decides nothing. None: it is not traced.
    traceparent: str | None = None


@value
class TakeOver(Command[Hold | Again]):
    """Take the key over after its lease ran out, or its record expired, if the record is still the one *seen*.

    An expired record becomes a new operation, but not under the token that it has: by its number and token, the new one
    could not be told from the old one, and a rival that has seen the old one would take over what it may not.

    With *is_abandoned* there is no client: an expired record is left alone, since no client has asked for it again, and
    a take-over counts as a try. A pending record is begun in this way only, and that is still its first attempt. A
    *claim* that is accepted only turns an expired record into a pending one again.
    """

    claim: Claim
    seen: Hold
    is_abandoned: bool = False


@value
class Complete(Command[Verdict]):
    """Store the ending and the answer. Repeating it is safe: if this hold's answer is stored, that is DONE."""

    hold: Hold
    event: Event
    answer: Answer
    #: Whether a request in any process may be waiting for this: it gets a hint, if the store can send hints.
    wakes: bool = False


@value
class Release(Command[Verdict]):
    """Free the key: nothing happened. Attempt 0 stands for *the attempt with this token, whatever its number*.

    After a take-over, an earlier attempt may have had an effect; after a saved step, this one had. Then the record
    stays, with its fingerprint and its count, and the next request or worker may take it over at once. An accepted
    record stays, too: its client was told that it would be run.
    """

    hold: Hold
    #: As of ``Complete``.
    wakes: bool = False
    #: Why, in a word or two, for the audit trail; it decides nothing.
    reason: str | None = field(default=None, compare=False)


@value
class Renew(Command[frozenset[Hold]]):
    """Renew every lease in one statement; the answer is the holds that are lost."""

    holds: tuple[tuple[Hold, timedelta], ...]


@value
class Save(Command[Verdict]):
    """Store how far the operation has come, in a transaction of its own. Repeating it is safe.

    It replaces *before*, or itself, and nothing else: a delayed copy of this command, which arrives after the operation
    has gone on, must not set it back.
    """

    hold: Hold
    progress: Progress
    before: Progress = field(default_factory=Progress)


@value
class Mark(Command[Verdict]):
    """Store the handler's own report of its progress, for the status URL. Nothing else depends on it."""

    hold: Hold
    milestone: Milestone


@value
class Park(Command[Verdict]):
    """Stop the operation until an operator resolves it. With *if_silent*, only if its lease is over.

    Its worker may ask twice. Of several other processes that ask at once, one gets ``DONE``.
    """

    hold: Hold
    if_silent: bool = False
    #: As of ``Release``.
    reason: str | None = field(default=None, compare=False)


@value
class Settle(Command[Record | None]):
    """Wait until no transaction under *hold* is running any more, then read the record.

    For a COMMIT without a reply: the record has this hold's token, and its steps or its answer, or it does not.
    """

    hold: Hold


@value
class Look(Command[Record | None]):
    """Read one record: for operators, and for a worker that has taken it over and needs its recovery point."""

    scope: str
    key: str


@value
class Browse(Command[tuple[Record, ...]]):
    """Read the newest records, for operators; *key* and *state* filter them. Bodies are not read.

    *digest* (or its beginning) finds a key that is known from a log only. That reads every key in the table.
    """

    limit: int
    key: str | None = None
    scope: str | None = None
    state: State | None = None
    #: Lower-case hexadecimal digits, from the first on.
    digest: str | None = None


@value
class Now(Command[datetime]):
    """Read the store's clock, the only one that decisions are made by."""
