"""What every store promises, in both colours. How one keeps its promises is its own affair.

A store carries out the store commands of ``core/commands.py``: ``Claim``, ``TakeOver``, ``Complete``, ``Release``,
``Renew``, ``Look``, ``Browse`` and ``Now``. It guarantees (``semel.testing.conformance`` holds it to each):

1. A claim is one atomic step. Of any number of claims on one (scope, key), in any number of processes, one wins.
2. At most one hold on a record is live; every write after the claim compares attempt *and* token, and a write whose
   hold is no longer live changes nothing and is ``FENCED``.
3. A terminal record does not change until it expires, and reading it writes nothing.
4. The fingerprint is stored with the claim, and stays as it is until the record expires.
5. Leases and retention are judged by the store's clock alone.
6. What ``Complete`` stored comes back byte for byte: status, header pairs in order, body; a tombstone stays one.
7. A ``Complete`` or ``Release`` whose reply was lost may be repeated, and a claim whose reply was lost bears its token.
8. A store that can't be reached raises ``StoreUnavailable``, and says whether the statement had been sent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self, TypeVar

from semel.core.commands import Command
from semel.stores.step import Step

T = TypeVar("T")


class Store(ABC):
    """A store for threads. It opens itself on first use; any number of threads may share it."""

    @abstractmethod
    def perform(self, command: Command[T]) -> T:
        """Carry out one store command."""

    @abstractmethod
    def open(self) -> None:
        """Connect, and raise ``StoreNotReady`` or ``StoreReadOnly`` where the store can't serve. Optional."""

    @abstractmethod
    def migrate(self) -> list[str]:
        """Bring the schema up to date; return what was applied. Safe to repeat, and to do from several places."""

    @abstractmethod
    def close(self) -> None:
        """Let go of every connection. Using the store again opens it again."""

    def __enter__(self) -> Self:
        """Open it."""
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()


class AsyncStore(ABC):
    """A store for one event loop at a time. It opens itself on first use."""

    @abstractmethod
    def perform(self, command: Command[T]) -> Step[T]:
        """Start one store command. It is carried out whether or not anybody waits for it."""

    @abstractmethod
    async def open(self) -> None:
        """Connect, and raise ``StoreNotReady`` or ``StoreReadOnly`` where the store can't serve. Optional."""

    @abstractmethod
    async def close(self) -> None:
        """Let go of every connection. Using the store again opens it again."""

    async def __aenter__(self) -> Self:
        """Open it."""
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        await self.close()
