"""What a store is asked by those who clean up, and by operators. Each is one transaction of the store's own."""

from __future__ import annotations

from datetime import timedelta

from semel.core.commands.base import Command, Verdict
from semel.core.message import Answer, Request
from semel.core.record import Entry, Hold, Stuck
from semel.core.recovery import Progress
from semel.core.value import value


@value
class FindStuck(Command[tuple[Stuck, ...]]):
    """Read the records that are in progress under a lease that has run out: scopes take turns, and of each scope the
    longest silent comes first (``upkeep.in_turn``).

    Those that are past retention, too, are the reaper's, and are not among them.
    """

    limit: int
    #: Whether only those whose request was kept are wanted.
    with_request: bool = False
    #: Whether those are wanted, too, whose key was freed: nobody holds them, and somebody may finish them.
    with_nobodys: bool = False
    #: Whether those are wanted, too, that were accepted and are pending, among the others by how long they wait.
    with_pending: bool = False
    #: Whether only those are wanted whose time has come (``upkeep.is_due``). However many others there are, they must
    #: not hide these.
    only_due: bool = False


@value
class ReadRequest(Command[Request | None]):
    """Read the request that was kept with a record, if *hold* still holds it."""

    hold: Hold


@value
class Sweep(Command[Verdict]):
    """Free the key of a dead worker, if its lease is still over. The record stays, and the next takes it over."""

    hold: Hold


@value
class Reaped:
    """What came of one round of reaping."""

    #: Terminal and past retention: gone.
    deleted: int = 0
    #: The same, where a late retry is to be refused: the answer is gone, and a tombstone stays.
    stripped: int = 0
    #: Neither ended nor held by anybody when they expired: they are failed now (408), and will be deleted next time.
    failed: int = 0

    @property
    def total(self) -> int:
        """How many records were touched."""
        return self.deleted + self.stripped + self.failed


@value
class Reap(Command[Reaped]):
    """Clear away at most *limit* records that are past retention. *abandoned* is the answer of those nobody ended."""

    limit: int
    abandoned: Answer


@value
class ReapTrail(Command[int]):
    """Delete at most *limit* lines of the audit trail that are older than *older_than*."""

    limit: int
    older_than: timedelta


@value
class Discard(Command[Verdict]):
    """Forget a record that has not ended, because an operator says so. Whoever holds it is fenced off."""

    hold: Hold


@value
class Unpark(Command[Verdict]):
    """Let a parked operation go on with *progress*, in which an operator has said what the effect did.

    It counts as an attempt, the operator's, and the tries without its client begin anew, and so does its retention.
    Nobody holds it then, and whoever comes next takes it over.
    """

    hold: Hold
    progress: Progress


@value
class Resolution(Command[Verdict]):
    """End a parked operation with *answer*, because an operator says that it took effect. Its retention begins anew."""

    hold: Hold
    answer: Answer


@value
class Note(Command[None]):
    """Write a line into the audit trail that no other statement writes: a replay, a write that was fenced off."""

    hold: Hold
    event: str
    detail: str | None = None


@value
class ReadTrail(Command[tuple[Entry, ...]]):
    """Read what the audit trail has of one key, oldest first."""

    scope: str
    key: str
    limit: int = 1000
