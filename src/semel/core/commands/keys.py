"""What a store is asked about one key. Each of these is one round trip, or one transaction of the store's own."""

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
    """Take the key if nobody has it; otherwise say what is there.

    The token is made by the caller: a record that bears it is this claim's, even if the reply was lost.
    """

    interruptible = True

    scope: str
    key: str
    token: bytes
    fingerprint: bytes
    lease: timedelta
    retention: timedelta
    #: What whoever finds the record stuck, or expired, has to know of its policy.
    on_crash: OnCrash = "rerun"
    after_retention: AfterRetention = "delete"
    #: Kept until the operation ends, so that it can be finished without its client.
    request: Request | None = None
    #: Whether it is only stored, as pending, with its request: a worker will take it from there. There is no lease yet.
    is_accepted: bool = False
    #: When the key says that it was made. If that is not after the store's own clock when the record is made, no
    #: tombstone is left ("strip" becomes "delete"): a retry past the retention is told by the age of its key.
    made_at: datetime | None = None
    #: Such as "POST /payments", for people; at most 200 characters.
    request_line: str = ""


@value
class TakeOver(Command[Hold | Again]):
    """Take the key from a holder whose lease ran out, or from a record that expired, if it is still the one *seen*.

    Without a client (*is_abandoned*) a record that expired is left alone, since nobody has asked for it again; and what
    is taken over is counted as a try. Only so is a pending one begun, which is its first attempt still. A *claim* that
    is accepted only makes a pending record again of one that expired.
    """

    interruptible = True

    claim: Claim
    seen: Hold
    is_abandoned: bool = False


@value
class Complete(Command[Verdict]):
    """Store how it ended, with the answer. Repeating it is safe: an answer stored under this hold is DONE."""

    hold: Hold
    event: Event
    answer: Answer
    #: Whether somebody may be waiting for this, in any process: they are given a hint, where the store can.
    wakes: bool = False


@value
class Release(Command[Verdict]):
    """Free the key: nothing happened. Attempt 0 stands for *whatever number this token was given*.

    After a take-over something may have happened, in an attempt before this one; and after a step that was saved, it
    has. Then the record stays, with its fingerprint and its count, and whoever comes next may take it over at once. One
    that was accepted stays, too: its client was told that it would be run.
    """

    hold: Hold
    #: As of ``Complete``.
    wakes: bool = False
    #: Why, in a word or two, for people who read the audit trail; it decides nothing.
    reason: str | None = field(default=None, compare=False)


@value
class Renew(Command[frozenset[Hold]]):
    """Prolong every lease in one statement; the answer is the holds that are lost."""

    holds: tuple[tuple[Hold, timedelta], ...]


@value
class Save(Command[Verdict]):
    """Store how far the operation has come, in a transaction of its own. Repeating it is safe.

    It takes the place of *before*, or of itself, and of nothing else: a copy of this that was held up on its way, and
    arrives when the operation has gone on, must not set it back.
    """

    interruptible = True

    hold: Hold
    progress: Progress
    before: Progress = field(default_factory=Progress)


@value
class Mark(Command[Verdict]):
    """Store how far the handler says it is, for whoever asks meanwhile. Nothing else depends on it."""

    interruptible = True

    hold: Hold
    milestone: Milestone


@value
class Park(Command[Verdict]):
    """Stop the operation until an operator has said what it did. With *if_silent*, only when its lease is over.

    Its worker may ask twice. Of several others that ask at once, one is told ``DONE``.
    """

    interruptible = True

    hold: Hold
    if_silent: bool = False
    #: As of ``Release``.
    reason: str | None = field(default=None, compare=False)


@value
class Settle(Command[Record | None]):
    """Wait until no transaction under *hold* is under way any more, then read the record.

    For a COMMIT whose reply was lost: the record bears this hold's token, and its steps or its answer, or it does not.
    """

    interruptible = True

    hold: Hold


@value
class Look(Command[Record | None]):
    """Read one record: for people, and for whoever has just taken it over and has to know how far it has come."""

    interruptible = True

    scope: str
    key: str


@value
class Browse(Command[tuple[Record, ...]]):
    """Read the newest records, for people; *key* and *state* narrow it down. Bodies stay behind.

    By its *digest*, or the beginning of that, a key is found that only a log has named. It reads every key there is.
    """

    limit: int
    key: str | None = None
    scope: str | None = None
    state: State | None = None
    #: Lower-case hexadecimal digits, from the first on.
    digest: str | None = None


@value
class Now(Command[datetime]):
    """Read the store's clock, the only one that decides."""

    interruptible = True
