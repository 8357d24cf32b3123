"""What the audit trail contains, and the history of one key. How a line is written is in ``stores/``.

The record itself has the ordinary facts: when it was made, in which attempt it is, when and how it ended. So the trail
has only the rest, unless more is configured.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from operator import attrgetter
from typing import Literal, Protocol, get_args

from semel.core.record import NO_TOKEN, Entry
from semel.core.state import State

#: How much is written: what the record does not contain; everything; everything and every replay; nothing.
Audit = Literal["on", "all", "replays", "off"]
AUDITS: tuple[Audit, ...] = get_args(Audit)

#: With these a line is written for every change of a record.
FULL: frozenset[str] = frozenset({"all", "replays"})

#: Events that the record itself shows, or that one line for a whole batch of the reaper sums up.
ORDINARY = frozenset({"claimed", "accepted", "completed", "failed", "reaped", "stripped"})

#: The key of lines that are about no single key.
NO_KEY = ""

#: The times of lines and records of one transaction may differ by this much.
_APART = timedelta(seconds=1)

_BEGINNINGS = frozenset({"claimed", "accepted"})
_ENDINGS = frozenset({"completed", "failed"})
#: Endings that leave a record without a holder.
_ENDINGS_BY_OTHERS = frozenset({"resolved", "abandoned"})


def reaped(deleted: int, stripped: int) -> str | None:
    """Sum up one batch of the reaper, for one line of the trail; None if it touched nothing."""
    counts = ((deleted, "deleted"), (stripped, "stripped"))
    return ", ".join(f"{count} {what}" for count, what in counts if count) or None


def erased(count: int, reason: str | None, what: str = "erased") -> str | None:
    """Sum up one part of an erasure, for one line of the trail that names no owner; None if it touched nothing."""
    return ": ".join(filter(None, (reason, f"{count} {what}"))) if count else None


#: What ``erased`` counts, where it is lines of the trail itself.
LINES = "audit lines deleted"


class Telling(Protocol):
    """The fields of a record that its history needs: a ``Record`` has them, or a row of the table."""

    @property
    def scope(self) -> str:
        """Half of its primary key."""

    @property
    def key(self) -> str:
        """The other half."""

    @property
    def state(self) -> str:
        """Its state."""

    @property
    def attempt(self) -> int:
        """Which attempt it is in, or ended with."""

    @property
    def token(self) -> bytes:
        """The token of that attempt."""

    @property
    def is_accepted(self) -> bool:
        """Whether it was accepted, to be run by a worker."""

    @property
    def created_at(self) -> datetime:
        """When it was made."""

    @property
    def completed_at(self) -> datetime | None:
        """When it ended."""


def story(record: Telling, trail: Sequence[Entry]) -> tuple[Entry, ...]:
    """Return the lines of *trail* and lines made from *record* itself, oldest first.

    The record names no process: its lines have an empty actor.
    """
    beginning = () if _tells_the_beginning(record, trail) else (_beginning(record),)
    ending = () if _tells_the_ending(record, trail) else _ending(record)
    return tuple(sorted((*beginning, *trail, *ending), key=attrgetter("at")))


def _beginning(record: Telling) -> Entry:
    event = "accepted" if record.is_accepted else "claimed"
    return Entry(record.created_at, record.scope, record.key, 1, event, "", None)


def _ending(record: Telling) -> tuple[Entry, ...]:
    if record.completed_at is None:
        return ()
    event = "completed" if record.state == State.COMPLETE else "failed"
    return (Entry(record.completed_at, record.scope, record.key, record.attempt, event, "", None),)


def _tells_the_beginning(record: Telling, trail: Sequence[Entry]) -> bool:
    if record.created_at == record.completed_at:
        # In atomic mode the record is made when the operation has ended: there was no claim.
        return True
    return any(
        line.event in _BEGINNINGS or (line.event == "taken over" and line.attempt == 1)
        for line in trail
        if line.at > record.created_at - _APART
    )


def _tells_the_ending(record: Telling, trail: Sequence[Entry]) -> bool:
    if record.completed_at is None:
        return False
    told = _ENDINGS | _ENDINGS_BY_OTHERS if record.token == NO_TOKEN else _ENDINGS
    return any(line.event in told for line in trail if line.at > record.completed_at - _APART)
