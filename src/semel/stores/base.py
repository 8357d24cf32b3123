"""The interface and the guarantees of every store, sync and async. No store is implemented here.

A store carries out the commands of ``core/commands/keys.py`` and ``upkeep.py``, each in its own transaction; and it
opens transactions for the application, in which the commands of ``steps.py`` are carried out. It guarantees
(``semel.testing.conformance`` tests each):

1. A claim is one atomic step. Of any number of claims on one (scope, key), in any number of processes, one wins.
2. At most one hold on a record is live; every write after the claim compares attempt *and* token, and a write under a
   hold that is no longer live changes nothing and is ``FENCED``.
3. A terminal record does not change until it expires, and reading it writes nothing.
4. The fingerprint is stored with the claim, and stays as it is until the record expires.
5. Leases and retention are measured by the store's clock alone.
6. What ``Complete`` stored comes back byte for byte: status, header pairs in order, body; a tombstone stays one.
7. A ``Complete``, ``Save`` or ``Release`` may be repeated if its reply was lost, and the record of a claim has its
   token, so that a claim with a lost reply is found.
8. A store that can't be reached raises ``StoreUnavailable``, and says whether the statement had been sent.
9. ``Save`` stores steps and recovery point; they stay through every take-over until the record expires, and a record
   with steps is never deleted by ``Release``.
10. Nothing in progress is reaped: ``Reap`` touches records that are past retention by the store's clock and that no
    worker holds, and no parked ones. Several processes may reap and sweep at once.
11. What the record itself does not show leaves a line in the audit trail, in the same transaction: a take-over, a
    step, a release, what services and operators did. With ``?audit=all`` every change does; a renewal, a milestone and
    a replay leave none.
12. A claim that is accepted makes a pending record, with its request and without a lease. Only a take-over without a
    client begins it. ``Release`` deletes it while it is pending, and never after.
13. ``Search`` walks past no more records than it may, and its pages together have every record that fits; ``Survey``
    counts none beyond its cap.
14. ``Erase`` makes tombstones of one owner's records that have ended, so that no retry of them runs, and changes no
    other record. It may be repeated, and be broken off between any two of its parts.
"""

from __future__ import annotations

import asyncio
import getpass
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextvars import copy_context
from functools import cached_property
from types import TracebackType
from typing import Any, Self, TypeVar

from semel.core.commands import Command, Now, Renew
from semel.core.record import Hold
from semel.errors import ConfigurationError
from semel.stores.dialect import Dialect
from semel.stores.endings import AsyncEndings, Endings
from semel.stores.migration import Layout, PlannedMigration
from semel.stores.step import Step
from semel.stores.transaction import AsyncTransaction, Transaction

T = TypeVar("T")


#: Computed once: every line of the audit trail has it.
_HOST = socket.gethostname()


def this_process() -> str:
    """Name this process, for the audit trail."""
    return f"{_HOST}:{os.getpid()}"


def this_user() -> str:
    """Name the user of this terminal, for the audit trail."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        # A container's user may have a number and no name.
        user = str(os.getuid())
    return f"{user}@{_HOST}"


_NO_TRANSACTIONS = "{} has no transactions to share: atomic mode and phases need PostgreSQL or SQLite."


_NO_LAYOUTS = (
    "{} has one layout, so there is no {} one to choose: partitions, which are dropped as a whole, are PostgreSQL's."
)


class Store(ABC):
    """A store for threads. It opens itself on first use; any number of threads may share it."""

    #: The actor in the audit trail; None is this process.
    actor: str | None = None
    #: Whether its audit trail has a line for every replay, too.
    notes_replays: bool = False
    #: Whether it answers what is stored encrypted: then nothing in front of it may keep that.
    decrypts: bool = False
    #: Whether commands use the calling thread's own connection, which is the application's.
    is_callers: bool = False
    #: Whether ``migrate`` and ``plan`` take up the migrations that old code does not survive, too.
    migrates_post: bool = False

    @cached_property
    def ended(self) -> Endings:
        """How many requests of this process have ended how. ``close`` has to close this first, which adds the rest."""
        return Endings(self)

    @property
    def dialect(self) -> Dialect | None:
        """Which database it is, for statements that join the application's transaction; None: it shares none."""
        return None

    def transaction(self) -> Transaction:
        """Return a transaction of the application's own, not begun yet, for atomic mode and for phases."""
        raise ConfigurationError(_NO_TRANSACTIONS.format(type(self).__name__))

    def check_transactions(self) -> None:
        """Raise if it has none: atomic mode can't work then, and its first request is too late to say so."""
        if type(self).transaction is Store.transaction:
            self.transaction()

    def listen(self, on_end: Callable[[str], None]) -> None:  # noqa: B027 - most stores give no hints
        """Call *on_end* with the name (``core/hint.py``) of every operation that ends from now on, in any process.

        These are hints: some may be lost, and a store without hints does nothing here. It is called in a thread
        of the store's own. Adding the same *on_end* again changes nothing, unless the store was closed since.
        """

    def watch(self, on_loss: Callable[[], None]) -> None:  # noqa: B027 - as above
        """Call *on_loss*, in any thread, when all holds that were claimed here up to then are lost.

        A store that only finds out when it renews leases does nothing here.
        """

    @abstractmethod
    def perform(self, command: Command[T]) -> T:
        """Carry out one store command."""

    def renewals(self) -> Callable[[Renew], frozenset[Hold]]:
        """Return what renews leases in this thread, over a connection of its own, where all others are greenlets."""
        return self.perform

    @abstractmethod
    def open(self) -> None:
        """Connect, and raise ``StoreNotReady`` or ``StoreReadOnly`` if the store can't serve. Optional."""

    def ping(self) -> None:
        """Raise a ``StoreError`` that says why, if no request can be guarded now: for an app's readiness check."""
        self.open()
        self.perform(Now())

    @abstractmethod
    def migrate(self) -> list[str]:
        """Bring the schema up to date; return what was applied. Safe to repeat, and to run from several processes."""

    def plan(self) -> tuple[PlannedMigration, ...]:
        """Return what ``migrate`` would do, and what that would lock. Changes nothing."""
        return ()

    def lay_out(self, layout: Layout) -> list[str]:
        """Change where large answers are kept; return what to tell people. Safe to repeat; requests go on meanwhile."""
        raise ConfigurationError(_NO_LAYOUTS.format(type(self).__name__, layout))

    def plan_layout(self, layout: Layout) -> tuple[PlannedMigration, ...]:
        """Return what ``lay_out`` would do, and what that would lock. Changes nothing."""
        raise ConfigurationError(_NO_LAYOUTS.format(type(self).__name__, layout))

    def has_neighbours(self) -> bool:
        """Whether the database has tables that are not Semel's: then the operator should be warned."""
        return False

    @abstractmethod
    def close(self) -> None:
        """Close every connection. Using the store again opens it again."""

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

    #: The actor in the audit trail; None is this process.
    actor: str | None = None
    #: Whether its audit trail has a line for every replay, too.
    notes_replays: bool = False
    #: Whether it answers what is stored encrypted: then nothing in front of it may keep that.
    decrypts: bool = False

    @cached_property
    def ended(self) -> AsyncEndings:
        """As in ``Store``."""
        return AsyncEndings(self)

    @property
    def dialect(self) -> Dialect | None:
        """Which database it is, for statements that join the application's transaction; None: it shares none."""
        return None

    def transaction(self) -> AsyncTransaction:
        """Return a transaction of the application's own, not begun yet, for atomic mode and for phases."""
        raise ConfigurationError(_NO_TRANSACTIONS.format(type(self).__name__))

    def check_transactions(self) -> None:
        """As in ``Store``."""
        if type(self).transaction is AsyncStore.transaction:
            self.transaction()

    def listen(self, on_end: Callable[[str], None]) -> None:  # noqa: B027 - most stores give no hints
        """Call *on_end* with the name (``core/hint.py``) of every operation that ends from now on, in any process.

        These are hints: some may be lost, and a store without hints does nothing here. It is called on the
        running loop. Adding the same *on_end* again changes nothing, unless the store was closed since.
        """

    def watch(self, on_loss: Callable[[], None]) -> None:  # noqa: B027 - as above
        """Call *on_loss*, in any thread, when all holds that were claimed here up to then are lost.

        A store that only finds out when it renews leases does nothing here.
        """

    @abstractmethod
    def perform(self, command: Command[T]) -> Step[T]:
        """Start one store command. It is carried out even if no task waits for it."""

    @abstractmethod
    def renew(self, command: Renew) -> frozenset[Hold]:
        """Renew leases; return the holds that are lost.

        This is called in a thread without an event loop. The store's own loop may be blocked meanwhile,
        so this must not need it, nor a connection that belongs to it.
        """

    def start_in_thread(self, call: Callable[[], Any]) -> asyncio.Future[Any]:
        """Start a plain function of the application in a thread, where it may use the transaction's connection."""
        return asyncio.get_running_loop().run_in_executor(None, copy_context().run, call)

    @abstractmethod
    async def open(self) -> None:
        """Connect, and raise ``StoreNotReady`` or ``StoreReadOnly`` if the store can't serve. Optional."""

    async def ping(self) -> None:
        """Raise a ``StoreError`` that says why, if no request can be guarded now: for an app's readiness check."""
        await self.open()
        await self.perform(Now())

    @abstractmethod
    async def close(self) -> None:
        """Close every connection. Using the store again opens it again."""

    async def __aenter__(self) -> Self:
        """Open it."""
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        await self.close()
