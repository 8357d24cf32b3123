"""What the application is asked, and how a handler can end."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta

from semel.core.commands.base import Command
from semel.core.events import Happening
from semel.core.fingerprint import Buffer
from semel.core.message import Answer, Headers
from semel.core.record import Hold, Stuck
from semel.core.recovery import Progress
from semel.errors import StepError


@dataclass(frozen=True, slots=True)
class NameScope(Command[str | None]):
    """Ask the application whose request this is."""

    interruptible = True


@dataclass(frozen=True, slots=True)
class ReadBody(Command[Buffer | None]):
    """Read the whole request body, or None when it is larger than *limit*."""

    interruptible = True

    limit: int


@dataclass(frozen=True, slots=True)
class Answered:
    """The handler ended with a whole answer, all of its headers still in place."""

    answer: Answer
    #: False when the application's router refused the request before any handler saw it.
    reached_handler: bool = True
    #: The handler said that nothing happened; or all that happened is in its steps, and a retry goes on from there.
    no_effect: bool = False
    #: The handler ended without taking (or finishing) steps that are stored. Such an answer can't be the operation's.
    skipped: StepError | None = None


@dataclass(frozen=True, slots=True)
class Streaming:
    """The handler began an answer that can't be kept: it is too large or has no end. None of it has been sent yet."""

    status: int
    headers: Headers
    #: As of an answer.
    skipped: StepError | None = None


@dataclass(frozen=True, slots=True)
class Raised:
    """The handler raised, and no answer came of it."""

    error: Exception
    no_effect: bool = False
    #: As of an answer.
    skipped: StepError | None = None


@dataclass(frozen=True, slots=True)
class Lost:
    """Another worker took the operation over in the middle. The handler was stopped, or its answer is of no account."""


@dataclass(frozen=True, slots=True)
class Parked:
    """The handler came to an effect whose outcome can't be known. The record says so already."""


@dataclass(frozen=True, slots=True)
class NotStarted:
    """The handler was not run at all, since this process is about to end."""


Ending = Answered | Streaming | Raised | Lost | Parked | NotStarted


@dataclass(frozen=True, slots=True)
class RunHandler(Command[Ending]):
    """Let the application handle the request, under this hold."""

    hold: Hold
    #: None in atomic mode, where the transaction itself is the lease.
    lease: timedelta | None
    #: How much of the answer is kept in memory before it counts as too large.
    limit: int
    #: The steps that earlier attempts have taken.
    progress: Progress = field(default_factory=Progress)


@dataclass(frozen=True, slots=True)
class FinishOne(Command[int | None]):
    """Run a stuck operation's stored request through the application, on from its recovery point.

    The answer is the status that it ended with, or None when it did not end.
    """

    stuck: Stuck


@dataclass(frozen=True, slots=True)
class Pause(Command[None]):
    """Wait."""

    duration: timedelta


@dataclass(frozen=True, slots=True)
class Tell(Command[None]):
    """Let people know."""

    happening: Happening
