"""Commands of the upkeep services and of operators. Each is one transaction of the store; no request uses one."""

from __future__ import annotations

from datetime import timedelta

from semel.core.commands.base import Command, Verdict
from semel.core.message import Answer, Request
from semel.core.record import Entry, Hold, Stuck
from semel.core.recovery import Progress
from semel.core.value import value


@value
class FindStuck(Command[tuple[Stuck, ...]]):
    """Read the records that are in progress under an expired lease. Scopes take turns, and of each scope the
    longest silent comes first (``upkeep.in_turn``).

    Records past retention are left out: the reaper handles them.
    """

    limit: int
    #: Whether to read only records with a stored request.
    with_request: bool = False
    #: Whether to read records with a freed key, too: no worker holds them, and the completer may finish them.
    with_no_token: bool = False
    #: Whether to read accepted, pending records, too, sorted among the others by how long they wait.
    with_pending: bool = False
    #: Whether to read only records that are due (``upkeep.is_due``). However many others there are, they must
    #: not hide these.
    only_due: bool = False


@value
class ReadRequest(Command[Request | None]):
    """Read the request that was stored with a record, if *hold* still holds it."""

    hold: Hold


@value
class Sweep(Command[Verdict]):
    """Free the key of a dead worker, if its lease is still over. The record stays, for the next worker to take over."""

    hold: Hold


@value
class Reaped:
    """The result of one round of reaping."""

    #: Terminal and past retention: deleted.
    deleted: int = 0
    #: The same, if a late retry is to be refused: the answer is deleted, and a tombstone stays.
    stripped: int = 0
    #: Neither ended nor held by a worker when they expired: they are failed now (408), and will be deleted next time.
    failed: int = 0

    @property
    def total(self) -> int:
        """How many records were touched."""
        return self.deleted + self.stripped + self.failed


@value
class Reap(Command[Reaped]):
    """Clear at most *limit* records that are past retention. *abandoned* is the answer for those that did not end."""

    limit: int
    abandoned: Answer


@value
class ReapTrail(Command[int]):
    """Delete at most *limit* lines of the audit trail that are older than *older_than*."""

    limit: int
    older_than: timedelta


@value
class Rotated:
    """The result of one step with the partitions of large answers."""

    #: Partitions that were made ahead, and that were dropped.
    made: int = 0
    dropped: int = 0
    #: Old answers that were in no partition of their day, and were deleted.
    deleted: int = 0
    #: What is in the way, and what to run.
    trouble: str | None = None

    @property
    def total(self) -> int:
        """How much was done."""
        return self.made + self.dropped + self.deleted


@value
class RotateAnswers(Command[Rotated]):
    """Make a partition ahead, or drop one in which every answer has expired; or delete at most *limit* old answers that
    are in neither. PostgreSQL alone carries it out; in its plain layout there is nothing to do.
    """

    limit: int


@value
class ReapInbox(Command[int]):
    """Delete at most *limit* receipts of handled messages that are older than *older_than*. Stores that keep messages
    carry it out: PostgreSQL and SQLite.
    """

    limit: int
    older_than: timedelta


@value
class Discard(Command[Verdict]):
    """Delete a record that has not ended, by an operator's order. A worker that holds it is fenced."""

    hold: Hold


@value
class Unpark(Command[Verdict]):
    """Let a parked operation go on with *progress*, which has the effect's outcome as an operator stated it.

    It counts as an attempt, the operator's. The tries without a client and the retention start again from zero. The
    record then has no holder, and the next request or worker takes it over.
    """

    hold: Hold
    progress: Progress


@value
class Resolution(Command[Verdict]):
    """End a parked operation with *answer*: an operator says that it took effect. Its retention starts again."""

    hold: Hold
    answer: Answer


@value
class Note(Command[None]):
    """Write a line into the audit trail that no other statement writes: a replay, a fenced write."""

    hold: Hold
    event: str
    detail: str | None = None


@value
class ReadTrail(Command[tuple[Entry, ...]]):
    """Read the audit trail of one key, oldest first."""

    scope: str
    key: str
    limit: int = 1000
