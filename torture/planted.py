"""Eleven bugs that stores and entry points have in the wild, planted in a child on purpose. What finds each is in
``duels``.

They spoil the commands on their way to a real store, so that everything else is as it always is.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from semel.core.commands import (
    Begin,
    Claim,
    Command,
    Commit,
    Complete,
    Finish,
    Look,
    Reap,
    Reaped,
    Save,
    TakeOver,
    Verdict,
)
from semel.core.record import Found, Hold, Record
from semel.core.recovery import Progress
from semel.core.state import State
from semel.errors import StoreUnavailable
from semel.flows import steps
from semel.guard.unstored import Unstored
from semel.stores import Store
from semel.wsgi.ports import RequestPorts
from torture.job import Job
from torture.witness import Database


class Spoiled(Store):
    """A real store behind a bug that changes its commands. This base class changes nothing."""

    def __init__(self, inner: Store, job: Job) -> None:
        """Spoil what goes to *inner*."""
        self.inner = inner
        #: For what no command can say: SQL that a careful store would not have.
        self.database = Database(job.url)
        self._away_seconds = job.away_seconds
        self._back_at: float | None = None

    def perform(self, command: Command[Any]) -> Any:
        """Carry out one store command. What comes after it has a line of its own: a fault may be there."""
        if self._away_seconds and isinstance(command, Complete) and self._back_at is None:
            self._back_at = time.monotonic() + self._away_seconds
        if self._back_at is not None and time.monotonic() < self._back_at:
            raise StoreUnavailable("It is away.")
        got = self.inner.perform(command)
        return got  # noqa: RET504 - see above

    def transaction(self) -> Any:
        """Return a transaction with the same bug in its commands."""
        return _Transaction(self)

    def join(self, command: Command[Any], transaction: _Transaction) -> Any:
        """Carry out one command of a transaction."""
        got = transaction.inner.perform(command)
        return got  # noqa: RET504 - as above

    def open(self) -> None:
        """Open the real one."""
        self.inner.open()

    def migrate(self) -> list[str]:
        """Migrate the real one."""
        return self.inner.migrate()

    def close(self) -> None:
        """Close the real one."""
        self.inner.close()

    def look(self, scope: str, key: str) -> Record | None:
        """Read a record."""
        return self.inner.perform(Look(scope, key))


class _Transaction:
    def __init__(self, store: Spoiled) -> None:
        self._store = store
        self.inner: Any = store.inner.transaction()

    @property
    def connection(self) -> Any:
        return self.inner.connection

    def perform(self, command: Command[Any]) -> Any:
        return self._store.join(command, self)


class NoFence(Spoiled):
    """Every write is accepted: neither the attempt nor the token is compared."""

    def perform(self, command: Command[Any]) -> Any:
        """Write under the current holder's attempt and token."""
        if isinstance(command, Complete | Save):
            command = replace(command, hold=self._holder(command.hold))
        return super().perform(command)

    def join(self, command: Command[Any], transaction: _Transaction) -> Any:
        """Write under the current holder's attempt and token."""
        if isinstance(command, Commit):
            command = replace(command, hold=self._holder(command.hold))
        return super().join(command, transaction)

    def _holder(self, hold: Hold) -> Hold:
        record = self.look(hold.scope, hold.key)
        return replace(hold, attempt=record.attempt, token=record.token) if record else hold


class NoToken(NoFence):
    """The attempt's number alone is compared."""

    def _holder(self, hold: Hold) -> Hold:
        holder = super()._holder(hold)
        return holder if holder.attempt == hold.attempt else hold


class AppClock(Spoiled):
    """The worker's own clock judges the leases."""

    def perform(self, command: Command[Any]) -> Any:
        """Judge a lease by this process's clock."""
        if isinstance(command, TakeOver):
            self.database.end_leases([command.claim.key])
        got = super().perform(command)
        if isinstance(command, Claim) and isinstance(got, Found) and got.state is State.PROCESSING:
            record = self.look(command.scope, command.key)
            ends = record and record.lease_expires_at
            return replace(got, lease_is_over=bool(ends and ends.timestamp() <= time.time()))
        return got


class ReadThenInsert(Spoiled):
    """A claim first reads whether the key is there, and then takes it, even if another worker took it meanwhile."""

    def perform(self, command: Command[Any]) -> Any:
        """Look first."""
        if isinstance(command, Claim) and self.look(command.scope, command.key) is None:
            self.database.lose(command.key)
        return super().perform(command)


class AnswerBeforeCommit(Spoiled):
    """The answer leaves, and then the transaction is committed."""

    def join(self, command: Command[Any], transaction: _Transaction) -> Any:
        """Put the end off."""
        if isinstance(command, Finish):
            _put_off.append(lambda: transaction.inner.perform(command))
            return Verdict.DONE
        return super().join(command, transaction)


class CompleteAfterCommit(Spoiled):
    """The handler's writes are committed, and the record is written in a transaction that comes after."""

    def join(self, command: Command[Any], transaction: _Transaction) -> Any:
        """Commit before the record is written."""
        if isinstance(command, Finish):
            unit, transaction.inner._unit = transaction.inner._unit, None  # noqa: SLF001 - a bug has no manners
            unit.commit()
            transaction.inner.perform(Begin(command.claim))
        return super().join(command, transaction)


class ReapInFlight(Spoiled):
    """The reaper deletes whatever is old."""

    def perform(self, command: Command[Any]) -> Any:
        """Look at nothing but the age."""
        if isinstance(command, Reap):
            deleted = self.database.execute(
                "DELETE FROM semel_keys WHERE expires_at <= clock_timestamp() RETURNING key"
            )
            return Reaped(len(deleted), 0, 0)
        return super().perform(command)


class FreedAfterSuccess(Spoiled):
    """The key is only a lock, and is freed when the work is done."""

    def perform(self, command: Command[Any]) -> Any:
        """Forget the record with its answer."""
        got = super().perform(command)
        if isinstance(command, Complete):
            self.database.lose(command.hold.key)
        return got


class PhaseNotStored(Spoiled):
    """A phase commits its writes, but not its step."""

    def join(self, command: Command[Any], transaction: _Transaction) -> Any:
        """Store no steps."""
        if isinstance(command, Commit):
            command = replace(command, progress=Progress())
        return super().join(command, transaction)


#: The bugs, by name, and the store that has each. Two are not the store's: the key sent downstream, and an answer that
#: its worker gives up when the store is away.
BUGS: dict[str, type[Spoiled]] = {
    "no fence": NoFence,
    "no token": NoToken,
    "app clock": AppClock,
    "read-then-insert": ReadThenInsert,
    "answer before commit": AnswerBeforeCommit,
    "complete after commit": CompleteAfterCommit,
    "reap in flight": ReapInFlight,
    "random downstream key": Spoiled,
    "freed after success": FreedAfterSuccess,
    "phase result not stored": PhaseNotStored,
    "answer given up": Spoiled,
}

#: What is to be done once the answer has left.
_put_off: list[Callable[[], object]] = []


def spoiled(name: str, store: Store, job: Job) -> Store:
    """Return *store* with the bug *name* in it; itself, without a name."""
    return BUGS.get(name, Spoiled)(store, job) if name else store


@contextmanager
def bug(name: str) -> Iterator[None]:
    """Plant a bug that is not in the store. For a child that ends soon: it is not removed again."""
    if name == "random downstream key":
        steps.derive = lambda *_: os.urandom(16).hex()  # type: ignore[attr-defined]  # imported there, and not exported
    if name == "answer given up":
        Unstored.add = lambda *_: False  # type: ignore[method-assign]
    if name == "answer before commit":
        close = RequestPorts._close  # noqa: SLF001 - as above

        def then_end(self: RequestPorts) -> None:
            while _put_off:
                _put_off.pop()()
            close(self)

        RequestPorts._close = then_end  # type: ignore[method-assign]  # noqa: SLF001
    yield
