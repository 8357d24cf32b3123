"""How a guarded request can end, as the entry points are told. Nothing here sends anything."""

from __future__ import annotations

from dataclasses import field

from semel.core.message import Answer
from semel.core.outcome import Ended
from semel.core.record import Hold
from semel.core.value import value


@value
class Send:
    """Send this answer."""

    answer: Answer
    #: For operators, here and below: it changes nothing that is sent.
    outcome: Ended = field(default="ran", compare=False)


@value
class PassOn:
    """Let the handler's own answer through: as it streams, or (for a request without a key) untouched."""

    #: As which operation the handler runs while its guard is switched off: nothing of it is recorded.
    unrecorded: Hold | None = None
    outcome: Ended = field(default="passed_on", compare=False)


@value
class Reraise:
    """Let the handler's exception through, after *answer* where there is one."""

    error: Exception
    answer: Answer | None
    outcome: Ended = field(default="ran", compare=False)


@value
class Done:
    """Send nothing: a handler that was run unguarded has answered by itself. What it raised goes on as it was."""

    outcome: Ended = field(default="reported", compare=False)


Reply = Send | PassOn | Reraise | Done
