"""The type of a command, and the two answers that many commands share. No command is here."""

from __future__ import annotations

from enum import Enum
from typing import Generic, TypeVar

T = TypeVar("T")


class Command(Generic[T]):
    """One round trip to a store, or one transaction that the store owns; ``T`` is its answer."""

    __slots__ = ()


class Again(Enum):
    """Another process changed the record after this statement's snapshot of the table: ask again."""

    AGAIN = "again"


class Verdict(Enum):
    """The result of a write that only the holder may make."""

    DONE = "done"
    FENCED = "fenced"  #: another worker holds the record now; nothing was written
