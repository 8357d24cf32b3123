"""What the console has counted since it started, by minute, for one hour. It is kept in memory, and not in the store.

A minute in which nothing was counted is missing, and not zero.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import datetime, timedelta

from semel.console.charts import Series
from semel.core.commands import Surveyed
from semel.core.value import value
from semel.errors import StoreUnavailable
from semel.stores.forks import start_afresh_in_children

MINUTES = 60
#: The counts that are shown are as old as this at most, in seconds, however many people look.
FRESH_SECONDS = 2.0
#: How long a thread waits for the first count that another makes.
FIRST_SECONDS = 10.0
#: Keys that were made since the last count are of this minute, more or less. After a longer pause they are of none.
MAX_PAUSE = timedelta(seconds=90)

_MINUTE = timedelta(minutes=1)
_EPOCH = datetime(1970, 1, 1)  # noqa: DTZ001 - only minutes are counted from it


@value
class Sample:
    """What was counted in one minute: keys made, and how many there were of others at its end."""

    made: int | None
    #: Each is None where the store can't tell, or keeps no messages.
    processing: int | None
    parked: int | None
    waiting: int | None
    outbox: int | None


class Samples:
    """Counts now and then, and remembers."""

    def __init__(
        self,
        count: Callable[[datetime | None], tuple[Surveyed, int | None]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """*count* counts in the store, and how many messages wait in the outbox."""
        self._count = count
        self._clock = clock
        self.start_afresh()
        start_afresh_in_children(self)
        self._minutes: dict[int, Sample] = {}
        self._last: Surveyed | None = None
        self._last_at = 0.0

    def start_afresh(self) -> None:
        """Let no thread count: in a forked child, the one that did so does not exist."""
        self._mutex = threading.Lock()
        self._counted = threading.Condition(self._mutex)
        self._is_counting = False

    def now(self) -> Surveyed:
        """Return the newest counts. While one thread counts, others get the last ones; or wait, if there are none."""
        with self._counted:
            if self._last is None and not self._counted.wait_for(lambda: not self._is_counting, FIRST_SECONDS):
                raise StoreUnavailable("The store has not been counted yet: it does not answer.")
            before = self._last
            if before is not None and (self._is_counting or self._clock() - self._last_at < FRESH_SECONDS):
                return before
            self._is_counting = True
        try:
            counts, outbox = self._count(None if before is None else before.now)
            with self._mutex:
                self._note(before, counts, outbox)
                self._last, self._last_at = counts, self._clock()
        finally:
            with self._counted:
                self._is_counting = False
                self._counted.notify_all()
        return counts

    def series(self) -> tuple[Series, ...]:
        """Return what was counted in the last hour."""
        with self._mutex:
            newest = 0 if self._last is None else _minute_of(self._last.now)
            hour = [self._minutes.get(newest - ago) for ago in reversed(range(MINUTES))]
        return (
            Series("Keys made", _of(hour, "made"), "new keys, per minute"),
            Series("In progress", _of(hour, "processing"), "under a live lease, at the end of each minute"),
            Series("To be resolved", _of(hour, "parked"), "outcome unknown, at the end of each minute"),
            Series("Accepted, waiting", _of(hour, "waiting"), "not begun, at the end of each minute"),
            Series("Outbox", _of(hour, "outbox"), "messages not sent yet, at the end of each minute"),
        )

    def _note(self, before: Surveyed | None, counts: Surveyed, outbox: int | None) -> None:
        minute = _minute_of(counts.now)
        is_known = before is not None and counts.now - before.now <= MAX_PAUSE
        earlier = self._minutes.get(minute)
        made = counts.made if is_known else None
        if earlier is not None and earlier.made is not None:
            made = earlier.made + (made or 0)
        gauges = counts.gauges
        self._minutes[minute] = Sample(made, gauges.in_flight, gauges.parked, gauges.accepted, outbox)
        for old in [each for each in self._minutes if each <= minute - MINUTES]:
            del self._minutes[old]


def _minute_of(moment: datetime) -> int:
    return (moment.replace(tzinfo=None) - (moment.utcoffset() or timedelta()) - _EPOCH) // _MINUTE


def _of(hour: list[Sample | None], name: str) -> tuple[int | None, ...]:
    return tuple(None if each is None else getattr(each, name) for each in hour)
