"""Everything a flow may ask the world to do, and what the world may answer. Nothing here does any of it.

Read ``answer = yield from Command(...)`` in a flow as: ask the world to do this, and here is its answer. One command is
one round trip, or one transaction that the store owns.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import Enum
from typing import Any, ClassVar, Generic, TypeVar

from semel.core.events import Happening
from semel.core.fingerprint import Buffer
from semel.core.message import Answer, Headers
from semel.core.record import Found, Hold, Record
from semel.core.state import Event, State

T = TypeVar("T")
Flow = Generator["Command[Any]", Any, T]


class Command(Generic[T]):
    """One request to the outside world; ``yield from command`` is its answer."""

    __slots__ = ()

    #: Whether a caller that goes away meanwhile ends the flow here. Once a handler runs, nothing does.
    interruptible: ClassVar[bool] = False

    def __iter__(self) -> Generator[Command[T], T, T]:
        """Ask, and return the answer."""
        return (yield self)


class Again(Enum):
    """A rival was quicker than this statement's view of the table: ask again."""

    AGAIN = "again"


class Verdict(Enum):
    """What came of a write that only the holder may make."""

    DONE = "done"
    FENCED = "fenced"  #: somebody else holds the record now; nothing was written


@dataclass(frozen=True, slots=True)
class Claim(Command[Hold | Found | Again]):
    """Take the key if nobody has it; otherwise say what is there.

    The token is made by the caller: a record that bears it is this claim's, even if the reply was lost.
    """

    interruptible = True

    scope: str
    key: str
    token: bytes
    fingerprint: bytes
    lease: timedelta
    retention: timedelta


@dataclass(frozen=True, slots=True)
class TakeOver(Command[Hold | Again]):
    """Take the key from a holder whose lease ran out, or from a record that expired, if it is still the one *seen*."""

    interruptible = True

    claim: Claim
    seen: Hold


@dataclass(frozen=True, slots=True)
class Complete(Command[Verdict]):
    """Store how it ended, with the answer. Repeating it is safe: an answer stored under this hold is DONE."""

    hold: Hold
    event: Event
    answer: Answer


@dataclass(frozen=True, slots=True)
class Release(Command[Verdict]):
    """Free the key: nothing happened. Attempt 0 stands for *whatever number this token was given*.

    After a take-over something may have happened, in an attempt before this one. Then the record stays, with its
    fingerprint and its count, and whoever comes next may take it over at once.
    """

    hold: Hold


@dataclass(frozen=True, slots=True)
class Renew(Command[frozenset[Hold]]):
    """Prolong every lease in one statement; the answer is the holds that are lost."""

    holds: tuple[tuple[Hold, timedelta], ...]


@dataclass(frozen=True, slots=True)
class Look(Command[Record | None]):
    """Read one record, for people."""

    scope: str
    key: str


@dataclass(frozen=True, slots=True)
class Browse(Command[tuple[Record, ...]]):
    """Read the newest records, for people; *key* and *state* narrow it down. Bodies stay behind."""

    limit: int
    key: str | None = None
    scope: str | None = None
    state: State | None = None


@dataclass(frozen=True, slots=True)
class Now(Command[datetime]):
    """Read the store's clock, the only one that decides."""

    interruptible = True


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
    #: The handler said that nothing happened.
    no_effect: bool = False


@dataclass(frozen=True, slots=True)
class Streaming:
    """The handler began an answer that can't be kept: it is too large or has no end. None of it has been sent yet."""

    status: int
    headers: Headers


@dataclass(frozen=True, slots=True)
class Raised:
    """The handler raised, and no answer came of it."""

    error: Exception
    no_effect: bool = False


@dataclass(frozen=True, slots=True)
class RunHandler(Command[Answered | Streaming | Raised]):
    """Let the application handle the request, under this hold."""

    hold: Hold
    lease: timedelta
    #: How much of the answer is kept in memory before it counts as too large.
    limit: int


@dataclass(frozen=True, slots=True)
class Pause(Command[None]):
    """Wait."""

    duration: timedelta


@dataclass(frozen=True, slots=True)
class Tell(Command[None]):
    """Let people know."""

    happening: Happening
