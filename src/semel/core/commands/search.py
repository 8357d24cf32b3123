"""Commands of those who look at many records: a page of those that fit a filter, and how many there are of each kind.
Nothing here is asked by a request.

What either reads is bounded, however large the table is: a search walks past at most so many records, and a survey
counts none beyond its limit.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from semel.core.commands.base import Command
from semel.core.events import StoreSurveyed
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
class Surveyed:
    """What is in a store at one moment, by its own clock."""

    now: datetime
    #: How many there are of each kind, none counted beyond the limit.
    gauges: StoreSurveyed
    #: In progress, and given back by a worker: they wait for their next request.
    free: int
    #: The record that is in progress under a live lease for the longest time: its scope, its key, and when it was made.
    oldest: tuple[str, str, datetime] | None
    #: All records; an estimate where they are more than the newest, and None where the store has none.
    total: int | None = None
    #: Of the newest records: how many were looked at, since when these were made, and how they have ended.
    newest: int = 0
    newest_since: datetime | None = None
    complete: int = 0
    failed: int = 0
    #: How many of these were made since ``Survey.since``.
    made: int = 0
    #: Whether there are more records that have not ended than were looked at: counts are then lower bounds.
    is_partial: bool = False

    @property
    def lapsed(self) -> int:
        """How many are in progress under a lease that has run out: stuck, or given back."""
        return (self.gauges.stuck or 0) + self.free


@value
class Survey(Command[Surveyed]):
    """Count what has not ended and what is past retention, each kind up to *limit*, by indexes alone, so that it takes
    no longer in a larger table. A store leaves out what it could not count like that.
    """

    limit: int
    #: How many of the newest records are looked at, for how operations end. Redis has no order of age, and looks at any
    #: so many; with 0 it tells only what its lists have.
    newest: int = 0
    #: By the store's clock.
    since: datetime | None = None
    #: Whether to count messages, too.
    with_messages: bool = False
