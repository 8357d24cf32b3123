"""What a command is, and the two answers that many of them share."""

from __future__ import annotations

from collections.abc import Generator
from enum import Enum
from typing import Any, ClassVar, Generic, TypeVar

T = TypeVar("T")
Flow = Generator["Command[Any]", Any, T]


class Command(Generic[T]):
    """One request to the outside world; ``yield from command`` is its answer."""

    __slots__ = ()

    #: Whether a caller that goes away meanwhile ends the flow here. Once a handler has run, nothing does.
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
