"""A handler's run: what it is run with, how it can end, and what is known of its effects. Nothing here runs it."""

from __future__ import annotations

from dataclasses import field
from datetime import timedelta
from enum import Enum
from typing import Any

from semel.core.message import Answer, Headers
from semel.core.record import Hold
from semel.core.recovery import Progress
from semel.core.value import value
from semel.errors import StepError


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
class RunHandler:
    """What a handler is run with."""

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


class TooManyWaiters(Enum):
    """There is no waiting for this key any longer: the time is over, or too many wait already."""

    TOO_MANY = "too many waiters"


@value
class Wait:
    """Wait, with nothing held, until somebody may know more of a key whose operation is in progress.

    ``AGAIN`` is to look for oneself: it is this one's turn to ask the store, or somebody has said that the operation
    ended. ``Found`` is what another of those who wait has come upon. The time is counted from the first of these
    commands that one request asks for.
    """

    scope: str
    key: str
    #: How long in all.
    patience: timedelta
    #: As ``Policy`` says.
    max_waiters: int | None
    max_waiters_per_key: int


@value
class Applied:
    """Said by ``verify`` of an effect: it happened, and this is its result."""

    result: Any


class Doubt(Enum):
    """What else can be known of an effect that was begun."""

    NOT_APPLIED = "not applied"
    CANT_TELL = "can't tell"
