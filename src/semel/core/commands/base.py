"""What a command is, and the two answers that many of them share."""

from __future__ import annotations

from enum import Enum
from typing import Generic, TypeVar

T = TypeVar("T")


class Command(Generic[T]):
    """One round trip to a store, or one transaction that the store owns; ``T`` is its answer."""

    __slots__ = ()


class Again(Enum):
    """A rival was quicker than this statement's view of the table: ask again."""

    AGAIN = "again"


class Verdict(Enum):
    """What came of a write that only the holder may make."""

    DONE = "done"
    FENCED = "fenced"  #: another worker holds the record now; nothing was written
