"""What a check can ask of a store, whichever it is. How it is asked is said for each kind of store."""

from __future__ import annotations

import shlex
from abc import ABC, abstractmethod
from dataclasses import dataclass
from datetime import timedelta
from typing import ClassVar

from semel.doctor.model import Kind


class Unavailable(Exception):
    """It can't be known here. The message is the reason."""


@dataclass(frozen=True, slots=True)
class Some:
    """Records or messages of one kind: how many there are, and how old the oldest is."""

    count: int
    #: None where there is none.
    age: timedelta | None = None
    #: Whether there may be more than were counted.
    is_more: bool = False
    #: Whether all were looked at.
    is_all: bool = True

    def __str__(self) -> str:
        """Say how many."""
        return f"{self.count}{' or more' if self.is_more else ''}"


@dataclass(frozen=True, slots=True)
class Handled:
    """What the newest finished records tell of the handlers."""

    count: int
    #: The longest time from a first attempt's claim to its answer.
    slowest: timedelta | None = None
    #: The request that it was.
    line: str | None = None
    #: How many answers were sent and could not be kept.
    unkept: int = 0


class Session(ABC):
    """A store that is examined."""

    kind: ClassVar[Kind]
    #: Whether it has records that outlive the process.
    has_records: ClassVar[bool] = True
    #: Its address, without a password.
    where: str
    #: The command that brings its tables up to date.
    migrate = "semel migrate URL"

    @property
    def secrets(self) -> tuple[str, ...]:
        """What may stand in no report: a server can repeat a password in what it says."""
        return ()

    @property
    def words(self) -> dict[str, str]:
        """What stands in commands for this store's own names, quoted as it is typed."""
        return {"URL": shlex.quote(self.where)}

    def close(self) -> None:  # noqa: B027 - a store that has nothing to close
        """Let go of connections."""

    def abandon(self) -> None:
        """Leave a connection behind that does not answer, and use another from now on."""
        self.close()

    def has_neighbours(self) -> bool:
        """Whether there are tables of others beside Semel's."""
        return False

    @abstractmethod
    def parked(self) -> Some:
        """Operations that wait for a person."""

    @abstractmethod
    def stuck(self) -> Some:
        """Operations in progress under a lease that is over; their age is how long it has been."""

    @abstractmethod
    def pending(self) -> Some:
        """Operations that were accepted and not begun."""

    @abstractmethod
    def expired(self) -> Some:
        """Records past their retention that the reaper has not removed; their age is how long they are past it."""

    @abstractmethod
    def waiting_messages(self) -> Some:
        """Messages of the outbox that no relay has sent."""

    @abstractmethod
    def dead_letters(self) -> Some:
        """Messages of the outbox that wait for a person."""

    @abstractmethod
    def parked_messages(self) -> Some:
        """Messages of the inbox that wait for a person."""

    @abstractmethod
    def closed_endpoints(self) -> list[tuple[str, str]]:
        """Endpoints of webhooks that are off: their names, and why."""

    @abstractmethod
    def handled(self) -> Handled:
        """What the newest finished records tell."""

    @abstractmethod
    def last_upkeep(self) -> timedelta | None:
        """How long ago a service was last seen at work; None: none ever was."""
