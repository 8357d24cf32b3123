"""The store in a process's memory, as far as there is something to say about it. No other process can look into it."""

from __future__ import annotations

from datetime import timedelta
from typing import ClassVar, NoReturn

from semel.doctor.model import Kind
from semel.doctor.session import Handled, Session, Some, Unavailable


class Memory(Session):
    """``memory://``."""

    kind = Kind.MEMORY
    has_records: ClassVar = False
    where = "memory://"

    def _nothing(self) -> NoReturn:
        raise Unavailable("The records are in the memory of another process.")

    def parked(self) -> Some:
        """Not known."""
        self._nothing()

    def stuck(self) -> Some:
        """Not known."""
        self._nothing()

    def pending(self) -> Some:
        """Not known."""
        self._nothing()

    def expired(self) -> Some:
        """Not known."""
        self._nothing()

    def waiting_messages(self) -> Some:
        """Not known."""
        self._nothing()

    def dead_letters(self) -> Some:
        """Not known."""
        self._nothing()

    def parked_messages(self) -> Some:
        """Not known."""
        self._nothing()

    def closed_endpoints(self) -> list[tuple[str, str]]:
        """Not known."""
        self._nothing()

    def handled(self) -> Handled:
        """Not known."""
        self._nothing()

    def last_upkeep(self) -> timedelta | None:
        """Not known."""
        self._nothing()
