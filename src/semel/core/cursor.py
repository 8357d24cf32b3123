"""Where a relay is in the queue of one destination, on a database with many writers. It reads nothing by itself.

Index entries of messages that were sent stay behind until the next vacuum, and a transaction that is left open keeps
them for as long as it lives. So a relay does not begin each walk at the beginning. But it must not go past a message
that is not visible yet: numbers are drawn before COMMIT, and a lower one may be committed later. A place is *safe* when
nothing is left below it after every transaction has ended that was running when nothing was left there before: a
message's number is drawn after its transaction has its own (``add`` sees to that), so none can appear there any more.

While one transaction is left open that has written something, nothing becomes safe. Then walks begin where the last
one found nothing left (*reached*), and look back to the safe place every few seconds, for what was committed late.

Messages that are due again are in another index, by time. Where many dead entries are there, they are looked for from
the first live one on, and from the beginning every few seconds.
"""

from __future__ import annotations

from semel.core.value import value

#: How long a place may wait to become safe before walks begin beyond it, in seconds.
PATIENCE = 1.0
#: The shortest time between two looks back; and what share of the time they may take.
LOOK_BACK_EVERY = 2.0
LOOK_BACK_SHARE = 0.05
#: So many entries are read each time. A claim of the largest batch needs a few thousand.
MAX_ENTRIES = 10_000
#: How often a walk begins at the beginning: for rows that were not written by ``add``, and after a fail-over in which
#: numbers went back.
AFRESH_EVERY = 300.0


@value
class Walk:
    """What one walk has seen."""

    #: The numbers of the first and the last ready message; None: there was none.
    first: int | None
    last: int | None
    #: Every transaction with a lower number had ended.
    xmin: int
    #: No transaction with this number or a higher one had begun.
    xmax: int
    #: The time, in seconds since 1970 by the store's clock, before which nothing waits for its next try.
    due: float = 0.0
    #: How many index entries were read for all of it, dead ones included.
    entries: int = 0


class Cursor:
    """The places of one relay at one destination. Times are of a clock that never goes back."""

    def __init__(self) -> None:
        """Begin at the beginning."""
        self.safe = 0
        self._reached = 0
        self._highest = 0
        #: What becomes safe once every transaction below the second number has ended; and since when it waits.
        self._pending: tuple[int, int, float] | None = None
        self._look_back_at = 0.0
        self._afresh_at: float | None = None
        self._due = 0.0
        self._look_for_due_at = 0.0

    def start_of_due(self, now: float) -> float:
        """Return from which time on to look for what is due again: the beginning, unless much is dead there."""
        return 0.0 if now >= self._look_for_due_at else self._due

    def note_due(self, start: float, walk: Walk, began: float, now: float) -> None:
        """Take note of a walk that looked for these from *start* on. What gets in before them is found later: a message
        of a transaction that was long under way, or after a clock was set back.
        """
        self._due = walk.due
        if start == 0.0:
            pause = max(LOOK_BACK_EVERY, (now - began) / LOOK_BACK_SHARE)
            self._look_for_due_at = now + pause if walk.entries > MAX_ENTRIES else now

    def start(self, now: float) -> int:
        """Return after which number to begin the next walk."""
        if self._afresh_at is None or now >= self._afresh_at:
            self.reset(now)
        if self._pending is None or now - self._pending[2] < PATIENCE or now >= self._look_back_at:
            return self.safe
        return self._reached

    def reset(self, now: float) -> None:
        """Begin at the beginning again."""
        self.safe = self._reached = self._highest = 0
        self._pending = None
        self._look_back_at = self._look_for_due_at = now
        self._afresh_at = now + AFRESH_EVERY

    def note(self, start: int, walk: Walk, began: float, now: float) -> None:
        """Take note of a walk that began after *start*, at *began*, and is over *now*."""
        self._highest = max(self._highest, walk.last or 0)
        left_off = self._highest if walk.first is None else walk.first - 1
        has_ended = self._pending is not None and walk.xmin >= self._pending[1]
        if start <= self.safe:
            # This walk has seen what those transactions have committed; one from beyond the safe place may not have.
            if self._pending is not None and has_ended:
                self.safe = max(self.safe, min(self._pending[0], left_off))
                self._pending = None
            if self._pending is None and left_off > self.safe:
                self._pending = (left_off, walk.xmax, now)
            self._look_back_at = now + max(LOOK_BACK_EVERY, (now - began) / LOOK_BACK_SHARE)
        elif has_ended:
            self._look_back_at = now
        self._reached = max(left_off, self.safe)
