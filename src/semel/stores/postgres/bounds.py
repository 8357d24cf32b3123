"""Where the live entries of an index begin, as far as one process knows. It runs nothing.

An entry of a record that is gone stays in its index until the next vacuum, and a transaction that is left open keeps
all of them for as long as it lives. What walks along an index from its old end, such as the reaper, would walk past
every one of them, again and again. So the first live entry is looked up before, from where it was last; and the walk
begins there.

A record may get in below that place: an operator lets one go on that was parked, a clock was set back. So the look-up
itself begins at the beginning, as long as few dead entries are there: the server counts what it read. Where there are
many, it does so every few seconds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal, get_args

from semel.core.commands import Browse, Command, FindStuck, Reap, ReapInbox, RotateAnswers, Search, Survey
from semel.core.state import TERMINAL
from semel.stores.statement import Statement

if TYPE_CHECKING:
    from semel.stores.postgres.builder import Builder

#: What is walked along: records by age, those that are followed, those that expire; receipts of messages.
Walk = Literal["made", "followed", "expiring", "handled"]
WALKS: tuple[Walk, ...] = get_args(Walk)

BEGINNING = datetime(1, 1, 1, tzinfo=UTC)
#: How far the place stays behind the clock, in seconds, where there is no live entry: see ``upkeep.SETTLED_SECONDS``.
SETTLED_SECONDS = 15

#: So many dead entries are walked past each time: about a millisecond.
MAX_DEAD = 2000
#: Between two looks from the beginning, where there are more: seconds, and one more for each so many entries. That is a
#: few hundredths of the server's time at most.
LOOK_BACK_SECONDS = 5.0
ENTRIES_A_SECOND = 100_000


class Bound:
    """The first live entry of one index. Times are of a clock that never goes back."""

    def __init__(self) -> None:
        """Know nothing."""
        self.place = BEGINNING
        self._look_back_at = 0.0

    def start(self, now: float) -> datetime:
        """Return from where to look for it."""
        return BEGINNING if now >= self._look_back_at else self.place

    def note(self, start: datetime, place: datetime, entries: int, now: float) -> None:
        """Note where it is, and how many entries had to be read from *start* on."""
        self.place = place
        if start == BEGINNING:
            pause = max(LOOK_BACK_SECONDS, entries / ENTRIES_A_SECOND)
            self._look_back_at = now + pause if entries > MAX_DEAD else now


class Bounds:
    """The bounds of all walks of one store."""

    def __init__(self) -> None:
        """Know nothing."""
        #: When the services' walk last went on, by a clock that never goes back (``upkeep.advance``).
        self.walked_at = -math.inf
        self._bounds: dict[str, Bound] = {walk: Bound() for walk in WALKS}

    def of(self, walk: Walk) -> datetime:
        """Return from where one walk begins."""
        return self._bounds[walk].place

    def parameters(self) -> dict[str, Any]:
        """Return from where each walk begins, for the statements that walk."""
        return {f"{walk}_from": bound.place for walk, bound in self._bounds.items()}

    def look(self, builder: Builder, walk: Walk) -> Statement[None]:
        """Build the statement that looks for the first live entry. To read its answer is to know it."""
        bound, now = self._bounds[walk], time.monotonic()
        start = bound.start(now)

        def read(rows: Sequence[Any]) -> None:
            place, entries = rows[0]
            bound.note(start, place, entries, now)

        return builder.statement(f"bound_{walk}", read, start=start, settled=SETTLED_SECONDS)


def walks_of(command: Command[Any]) -> tuple[Walk, ...]:
    """Return what *command* walks along from an old end, or towards it."""
    if isinstance(command, Search):
        if command.wanted.scope is not None and command.wanted.key is not None:
            return ()
        return ("followed",) if command.wanted.is_unfinished else ("made",)
    if isinstance(command, Browse):
        return ("made",) if command.state is None or command.state in TERMINAL else ("followed",)
    return _WALKS.get(type(command), ())


_WALKS: dict[type[Command[Any]], tuple[Walk, ...]] = {
    FindStuck: ("followed",),
    Reap: ("expiring",),
    ReapInbox: ("handled",),
    RotateAnswers: ("expiring",),
    Survey: ("followed", "expiring", "made"),
}
