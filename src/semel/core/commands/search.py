"""Commands of people who look at many records: a page of those that fit a filter, and how many there are of each kind.
Nothing here is asked by a request or a service.

What either reads is bounded, however large the table is: a search walks past at most so many records, and a count
stops at a cap.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from semel.core.commands.base import Command
from semel.core.place import read_place
from semel.core.record import Record
from semel.core.state import State
from semel.core.value import value


@value
class Filter:
    """Which records are wanted: those that fit all that is given."""

    scope: str | None = None
    key: str | None = None
    #: The beginning of the key's digest, as logs show it: lower-case hexadecimal digits.
    digest: str | None = None
    state: State | None = None
    #: Only those in progress under a lease that has run out.
    is_stuck: bool = False
    #: A part of the request line.
    endpoint: str | None = None
    #: Made within this time, or before it.
    newer_than: timedelta | None = None
    older_than: timedelta | None = None
    #: The lowest and the highest status of the answer.
    status: tuple[int, int] | None = None
    #: A part of a reason in the audit trail: why it was parked, released or given up.
    reason: str | None = None

    @property
    def is_unfinished(self) -> bool:
        """Whether only records are wanted that have not ended: stores find these without walking past the others."""
        return self.is_stuck or self.state in {State.PENDING, State.PROCESSING, State.UNKNOWN}


@value
class Page:
    """Records that fit, the newest first, without their bodies."""

    records: tuple[Record, ...]
    #: Where to go on, for ``Search.after``; None: nothing is left.
    further: str | None = None
    #: How many records were walked past, and whether the walk ended before enough were found, at its limit.
    walked: int = 0
    is_cut: bool = False


@value
class Search(Command[Page]):
    """Read at most *limit* of the records that fit, and walk past at most *scan*."""

    wanted: Filter
    limit: int
    scan: int
    #: ``Page.further`` of the page before this one; only the store that made it can read it.
    after: str | None = None

    def __post_init__(self) -> None:
        """Refuse a place that no store has made."""
        if self.after is not None:
            read_place(self.after)


@value
class Counts:
    """How many records there are of each kind; none is counted beyond the cap."""

    #: When they were counted, by the store's clock.
    now: datetime
    #: All records; an estimate above the cap, and None where the store has none.
    total: int | None
    pending: int
    #: Under a live lease; and under one that has run out.
    processing: int
    stuck: int
    unknown: int
    #: Past their retention: what the reaper has to do.
    expired: int
    #: The oldest record that is in progress.
    oldest: tuple[str, str, datetime] | None
    #: Of the newest records: how many were looked at, since when these were made, and how they have ended.
    newest: int
    newest_since: datetime | None
    complete: int
    failed: int
    #: How many were made since ``Count.since``; some stores count them among the newest only.
    made: int
    #: Whether the store looked at some of its records only, in no order: Redis, where it has many.
    is_partial: bool = False


@value
class Count(Command[Counts]):
    """Count up to *cap* of each kind; look at so many of the *newest* for how operations end."""

    cap: int
    newest: int
    #: By the store's clock.
    since: datetime | None = None
