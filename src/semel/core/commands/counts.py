"""Commands about how many requests have ended how, minute by minute. No request waits for one of them.

A process counts in memory (``Store.ended``), and adds what it has counted now and then. What a process has not added
when it is killed is lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from semel.core.commands.base import Command
from semel.core.value import value

#: Counted with each addition: a minute that has it was counted, even if no request ended in it.
ADDED = "added"
#: Counted where a worker has run an operation to its end, without its client: that is no request.
COMPLETED = "completed"


@value
class AddCounts(Command[None]):
    """Add to the counts of this minute, by the store's clock, and delete those that are some hours old."""

    counts: Mapping[str, int]


@value
class Minutes:
    """What was counted in the last minutes."""

    #: When it was read, by the store's clock.
    now: datetime
    #: The beginning of a minute, an outcome, and how many there were.
    counts: tuple[tuple[datetime, str, int], ...]


@value
class ReadCounts(Command[Minutes]):
    """Read the counts of the last so many *minutes*."""

    minutes: int
