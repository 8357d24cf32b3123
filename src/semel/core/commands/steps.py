"""Commands in the application's own transactions: atomic mode and phases. Commands on a key alone are in ``keys``."""

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

    A lock that another transaction holds counts as a record in progress, with its fingerprint if that is known.
    With any answer, the transaction stays open until ``Finish`` or ``Undo``.
    """

    claim: Claim


@value
class Finish(Command[Verdict]):
    """Write the record with its answer into the handler's transaction, and commit.

    *seen* is the record that it replaces, if there was one: expired, or left behind by a dead worker.
    ``FENCED``: another worker has written the record, and everything was rolled back.
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
    """Write the progress into the phase's transaction, and commit. ``FENCED``: rolled back."""

    hold: Hold
    progress: Progress
    #: As of ``Save``.
    before: Progress = field(default_factory=Progress)


@value
class CommitAlone(Command[None]):
    """Commit what the application wrote, without a record: the guard is switched off for this operation."""


@value
class Undo(Command[None]):
    """Roll back the open transaction, if there is one."""
