"""Transactions without a database: only the record is written, at the end. Nothing else can be rolled back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from semel.core.commands import Begin, Command, Commit, CommitAlone, Finish, Open, Undo, Verdict
from semel.core.record import NO_TOKEN, Found, Hold
from semel.core.state import State
from semel.errors import NoConnection, NoDatabase
from semel.stores.transaction import AsyncTransaction, Transaction

if TYPE_CHECKING:
    from semel.stores.memory.store import MemoryStore

T = TypeVar("T")


class Nothing:
    """In place of a connection: code that does not use it can be tested, and code that does gets ``NoDatabase``."""

    def __getattr__(self, name: str) -> NoReturn:
        """Raise ``NoDatabase``."""
        raise NoDatabase

    def __repr__(self) -> str:
        """Show what it is."""
        return "<no connection: memory://>"


NOTHING = Nothing()


class MemoryTransaction(Transaction):
    """One transaction, from ``Begin`` or ``Open`` to its end. It has no connection."""

    def __init__(self, memory: MemoryStore, actor: str | None = None) -> None:
        """Nothing is begun yet."""
        self._memory = memory
        self._actor = actor
        self._is_open = False
        #: The key that ``Begin`` has locked.
        self._locked: tuple[str, str] | None = None

    @property
    def connection(self) -> Nothing:
        """A placeholder. It is an error to ask for it while the transaction is not open."""
        if not self._is_open:
            raise NoConnection
        return NOTHING

    def perform(self, command: Command[T]) -> T:
        """Carry out one command."""
        answer: Any = None
        match command:
            case Begin():
                answer = self._lock_and_read(command)
            case Open():
                self._is_open = True
            case Finish() | Commit():
                answer = self._write_and_close(command)
            case Undo() | CommitAlone():
                self._close()
            case _:
                raise AssertionError(command)
        return answer  # type: ignore[no-any-return]  # by the command's own type

    def _lock_and_read(self, command: Begin) -> Hold | Found:
        claim = command.claim
        rivals = self._memory.lock(claim)
        if rivals is not None:
            found = self._memory.act(command, self._actor)
            if isinstance(found, Found) and not found.may_be_taken:
                return found  # It has the fingerprint of the request that has the lock.
            return Found(State.PROCESSING, 1, NO_TOKEN, rivals, None, lease_is_over=False, is_expired=False)
        self._is_open, self._locked = True, (claim.scope, claim.key)
        return self._memory.act(command, self._actor)

    def _write_and_close(self, command: Finish | Commit) -> Verdict:
        if not self._is_open:
            raise NoConnection
        try:
            return self._memory.act(command, self._actor)
        finally:
            self._close()

    def _close(self) -> None:
        self._is_open = False
        if self._locked is not None:
            self._memory.unlock(*self._locked)
            self._locked = None


class AsyncMemoryTransaction(AsyncTransaction):
    """The same, for an event loop."""

    def __init__(self, memory: MemoryStore, actor: str | None = None) -> None:
        """Nothing is begun yet."""
        self._transaction = MemoryTransaction(memory, actor)

    @property
    def connection(self) -> Nothing:
        """A placeholder. It is an error to ask for it while the transaction is not open."""
        return self._transaction.connection

    async def perform(self, command: Command[T]) -> T:
        """Carry out one command."""
        return self._transaction.perform(command)
