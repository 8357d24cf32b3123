"""A handler's run as values: its input, how it can end, and what is known of its effects. Nothing here runs it."""

from __future__ import annotations

from dataclasses import field
from datetime import timedelta
from enum import Enum
from typing import Any

from semel.core.commands.keys import Save
from semel.core.message import Answer, Headers
from semel.core.record import Hold
from semel.core.recovery import Progress
from semel.core.value import value
from semel.errors import StepError


@value
class Answered:
    """The handler ended with a complete answer, with all of its headers."""

    answer: Answer
    #: False if the application's router refused the request before any handler ran.
    reached_handler: bool = True
    #: The handler said that nothing happened; or all that happened is in its steps, and a retry goes on after them.
    no_effect: bool = False
    #: The handler ended without taking (or finishing) steps that are stored. Such an answer can't be the operation's.
    skipped: StepError | None = None
    #: The handler works in steps: if its ending is not kept, a retry goes on after the last step that is done.
    has_steps: bool = False
    #: The result of an effect that the store did not take.
    unsaved: Save | None = None


@value
class Streaming:
    """The handler began an answer that can't be kept: it is too large or has no end. None of it has been sent yet."""

    status: int
    headers: Headers
    #: As of an answer, here and below.
    skipped: StepError | None = None
    unsaved: Save | None = None
    no_effect: bool = False
    #: Whether the key is freed, whatever the status: nothing was begun, or another guard keeps it.
    is_freed: bool = False


@value
class Raised:
    """The handler raised, and no answer came of it."""

    error: Exception
    no_effect: bool = False
    #: As of an answer.
    skipped: StepError | None = None
    has_steps: bool = False
    unsaved: Save | None = None


@value
class Lost:
    """Another worker took the operation over. The handler was stopped, or its answer does not count."""

    #: False if it was not even begun.
    has_run: bool = True


@value
class Parked:
    """The handler came to an effect with an unknown outcome. The record is parked already."""


@value
class NotStarted:
    """The handler was not run at all, since this process is about to end."""


Ending = Answered | Streaming | Raised | Lost | Parked | NotStarted


@value
class RunHandler:
    """The input of a handler's run."""

    hold: Hold
    #: None in atomic mode, in which the transaction itself is the lease.
    lease: timedelta | None
    #: Bytes of the answer that are kept in memory before it counts as too large.
    limit: int
    #: The steps that earlier attempts have taken.
    progress: Progress = field(default_factory=Progress)
    #: Which request it is for, as ``request_of`` writes it; empty if that is not known.
    request: str = ""
    #: How long an answer is held back, from its first byte, before it is sent as a stream; None: no limit.
    max_response_time: timedelta | None = None


class TooManyWaiters(Enum):
    """The request can't wait for this key any longer: its time is over, or too many requests wait already."""

    TOO_MANY = "too many waiters"


@value
class Wait:
    """Wait, holding no connection and no lock, until there may be news of a key in progress.

    ``AGAIN``: ask the store. It is this waiter's turn to ask, or a hint says that the operation ended. ``Found`` is
    what another waiter for the same key has read. The time is counted from the first such command of a request.
    """

    scope: str
    key: str
    #: The maximum in all.
    patience: timedelta
    #: As ``Policy`` says.
    max_waiters: int | None
    max_waiters_per_key: int


@value
class Applied:
    """Returned by ``verify`` of an effect: it happened, and this is its result."""

    result: Any


class Doubt(Enum):
    """What else ``verify`` can return for an effect that was begun."""

    NOT_APPLIED = "not applied"
    CANT_TELL = "can't tell"
