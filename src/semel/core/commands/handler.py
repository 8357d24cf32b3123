"""What the application is asked, and how a handler can end."""

from __future__ import annotations

from dataclasses import field
from datetime import timedelta
from enum import Enum

from semel.core.commands.base import Again, Command
from semel.core.events import Happening
from semel.core.fingerprint import Buffer
from semel.core.message import Answer, Headers
from semel.core.record import Found, Hold, Stuck
from semel.core.recovery import Progress
from semel.core.value import value
from semel.errors import StepError


@value
class NameScope(Command[str | None]):
    """Ask the application whose request this is."""

    interruptible = True


@value
class ReadBody(Command[Buffer | None]):
    """Read the whole request body, or None when it is larger than *limit*."""

    interruptible = True

    limit: int


@value
class Answered:
    """The handler ended with a whole answer, all of its headers still in place."""

    answer: Answer
    #: False when the application's router refused the request before any handler saw it.
    reached_handler: bool = True
    #: The handler said that nothing happened; or all that happened is in its steps, and a retry goes on from there.
    no_effect: bool = False
    #: The handler ended without taking (or finishing) steps that are stored. Such an answer can't be the operation's.
    skipped: StepError | None = None
    #: The handler works in steps: where its ending is not kept, a retry goes on after the last one that is done.
    has_steps: bool = False


@value
class Streaming:
    """The handler began an answer that can't be kept: it is too large or has no end. None of it has been sent yet."""

    status: int
    headers: Headers
    #: As of an answer.
    skipped: StepError | None = None


@value
class Raised:
    """The handler raised, and no answer came of it."""

    error: Exception
    no_effect: bool = False
    #: As of an answer.
    skipped: StepError | None = None
    has_steps: bool = False


@value
class Lost:
    """Another worker took the operation over in the middle. The handler was stopped, or its answer is of no account."""


@value
class Parked:
    """The handler came to an effect whose outcome can't be known. The record says so already."""


@value
class NotStarted:
    """The handler was not run at all, since this process is about to end."""


Ending = Answered | Streaming | Raised | Lost | Parked | NotStarted


@value
class RunHandler(Command[Ending]):
    """Let the application handle the request, under this hold."""

    hold: Hold
    #: None in atomic mode, where the transaction itself is the lease.
    lease: timedelta | None
    #: How much of the answer is kept in memory before it counts as too large.
    limit: int
    #: The steps that earlier attempts have taken.
    progress: Progress = field(default_factory=Progress)
    #: Which request it is for, as ``request_of`` writes it; empty where that is not known.
    request: str = ""
    #: How long an answer is held back, from its beginning, before it is sent as it comes; None: for ever.
    max_response_time: timedelta | None = None


@value
class RunUnguarded(Command[int | None]):
    """Let the application handle and answer the request as if nobody watched, and say how that went (report mode).

    Whoever carries this out

    - gives the handler the request as it came: what was read of its body, and then the rest of it;
    - lets the answer through as it comes, streams included, with every header, and holds nothing of it back;
    - leaves ``current()`` as it would be without a guard, and steps to nobody;
    - renews *lease* meanwhile, where there is a *hold*. A lease that is lost ends nothing;
    - answers when the answer has left (or, for a door inside a framework, when the handler has returned it), or when
      the handler has raised: with the status that the answer began with, None where it never began one;
    - keeps what the handler raised to itself until the flow has ended, and raises it then, unchanged.

    The flow ends with the reply ``Done``. Nothing that happens to it after this command is of account to the client: a
    handler that is cancelled or killed ends it, and the lease does the rest.
    """

    interruptible = True

    #: None where the store knows nothing of this run: a duplicate, no key, or no store.
    hold: Hold | None = None
    lease: timedelta | None = None


@value
class FinishOne(Command[int | Again | None]):
    """Run a stuck operation's stored request through the application, on from its recovery point.

    The answer is the status that it ended with, or None when it did not end. ``AGAIN``: it was not run, since somebody
    else has it, or this process is about to end.
    """

    stuck: Stuck


class NoRoom(Enum):
    """There is no waiting for this key any longer: the time is over, or too many wait already."""

    NO_ROOM = "no room"


@value
class Wait(Command[Found | Again | NoRoom]):
    """Wait, with nothing held, until somebody may know more of a key whose operation is in progress.

    ``AGAIN`` is to look for oneself: it is this one's turn to ask the store, or somebody has said that the operation
    ended. ``Found`` is what another of those who wait has come upon. The time is counted from the first of these
    commands that one request asks for.
    """

    interruptible = True

    scope: str
    key: str
    #: How long in all.
    patience: timedelta
    #: As ``Policy`` says.
    max_waiters: int | None
    max_waiters_per_key: int


@value
class Announce(Command[None]):
    """Tell the others in this process who wait for a key what was found of it: it has ended."""

    scope: str
    key: str
    found: Found


@value
class Pause(Command[None]):
    """Wait."""

    duration: timedelta


@value
class Tell(Command[None]):
    """Let people know."""

    happening: Happening
