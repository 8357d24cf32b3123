"""What happens in the application's own transactions, and in calls to others: atomic mode, phases and effects."""

from __future__ import annotations

from dataclasses import field

from semel.core.commands.base import Command, Verdict
from semel.core.commands.keys import Claim
from semel.core.message import Answer
from semel.core.record import Found, Hold
from semel.core.recovery import Progress
from semel.core.state import Event
from semel.core.value import value


@value
class Begin(Command[Hold | Found]):
    """Open the transaction that the handler will write in, take the key's lock and read what is there.

    A lock that another transaction holds is a record in progress, with that one's fingerprint as far as it is known.
    Whatever the answer, the transaction is open until ``Finish`` or ``Undo``.
    """

    claim: Claim


@value
class Finish(Command[Verdict]):
    """Write the record with its answer into the handler's transaction, and commit.

    *seen* is the record that it takes the place of, where there was one: expired, or left behind by a dead worker.
    ``FENCED``: somebody else has written the record, and everything was rolled back.
    """

    claim: Claim
    hold: Hold
    seen: Hold | None
    event: Event
    answer: Answer
    #: As of ``Complete``.
    wakes: bool = False


@value
class Open(Command[None]):
    """Open the transaction of a phase."""


@value
class Commit(Command[Verdict]):
    """Write how far the operation has come into the phase's transaction, and commit. ``FENCED``: rolled back."""

    hold: Hold
    progress: Progress
    #: As of ``Save``.
    before: Progress = field(default_factory=Progress)


@value
class CommitAlone(Command[None]):
    """Commit what the application wrote, and nothing of ours: the operation's guard is switched off."""


@value
class Undo(Command[None]):
    """Roll the open transaction back. Nothing happens where there is none."""
