"""The store, sync and async. The commands themselves are in ``keys.py`` and ``upkeep.py``."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlsplit

from semel.core.commands import (
    AddCounts,
    Begin,
    Browse,
    Claim,
    Command,
    Commit,
    Complete,
    Discard,
    Erase,
    EraseTrail,
    FindStuck,
    Finish,
    Look,
    Mark,
    Note,
    Now,
    Park,
    ReadCounts,
    ReadRequest,
    ReadTrail,
    Reap,
    ReapTrail,
    Release,
    Renew,
    Resolution,
    Save,
    Search,
    Settle,
    Survey,
    Sweep,
    TakeOver,
    Unpark,
)
from semel.core.record import Hold
from semel.core.trail import AUDITS, Audit
from semel.errors import ConfigurationError
from semel.stores.base import AsyncStore, Store, this_process
from semel.stores.memory.keys import Keys
from semel.stores.memory.table import Clock, Moment
from semel.stores.memory.transaction import AsyncMemoryTransaction, MemoryTransaction
from semel.stores.memory.upkeep import Upkeep
from semel.stores.step import Step

T = TypeVar("T")


def _system_clock() -> datetime:
    # This process is the database, so its clock is the database's.
    return datetime.now(UTC)  # noqa: TID251 - see above


class MemoryStore(Keys, Upkeep, Store):
    """Records in a dictionary, under one lock."""

    def __init__(self, url: str = "memory://", *, clock: Clock = _system_clock) -> None:
        """Start empty. Tests give a *clock* they can move."""
        audit = _audit(url)
        super().__init__(audit)
        self.notes_replays = audit == "replays"
        self._clock = clock
        self._lock = threading.Lock()
        self._perform: dict[type[Command[Any]], Callable[[Any, Moment], Any]] = {
            AddCounts: self._add_counts,
            Begin: self._begin,
            Browse: self._browse,
            Claim: self._claim,
            Commit: self._save,
            Complete: self._complete,
            Resolution: self._resolve,
            Discard: self._discard,
            Erase: self._erase,
            EraseTrail: self._erase_trail,
            FindStuck: self._find_stuck,
            Finish: self._finish,
            Look: self._look,
            Mark: self._mark,
            Note: self._note,
            Now: lambda _, moment: moment.now,
            Park: self._park,
            ReadCounts: self._read_counts,
            ReadRequest: self._read_request,
            ReadTrail: self._read_trail,
            Reap: self._reap,
            ReapTrail: self._reap_trail,
            Release: self._release,
            Renew: self._renew,
            Save: self._save,
            Search: self._search,
            Settle: self._settle,
            Survey: self._survey,
            Sweep: self._sweep,
            TakeOver: self._take_over,
            Unpark: self._unpark,
        }

    def perform(self, command: Command[T]) -> T:
        """Carry out one store command."""
        return self.act(command, self.actor)

    def act(self, command: Command[T], actor: str | None) -> T:
        """Carry out one store command in the name of *actor*."""
        with self._lock:
            moment = Moment(self._clock(), actor or this_process())
            return self._perform[type(command)](command, moment)  # type: ignore[no-any-return]  # by the table

    def transaction(self) -> MemoryTransaction:
        """Return a transaction. It has no connection: it is for flows, and for reading."""
        return MemoryTransaction(self, self.actor)

    def age(self, duration: timedelta) -> None:
        """Make everything older by *duration*. For tests."""
        with self._lock:
            self._make_older(duration)

    def lock(self, claim: Claim) -> bytes | None:
        """Lock a key for atomic mode; or return the fingerprint of the request that has it locked."""
        with self._lock:
            rivals = self._running.get((claim.scope, claim.key))
            if rivals is None:
                self._running[claim.scope, claim.key] = claim.fingerprint
            return rivals

    def unlock(self, scope: str, key: str) -> None:
        """Unlock a key."""
        with self._lock:
            self._running.pop((scope, key), None)

    def open(self) -> None:
        """There is nothing to open."""

    def migrate(self) -> list[str]:
        """There is no schema."""
        return []

    def close(self) -> None:
        """There is nothing else to close."""
        self.ended.close()


class AsyncMemoryStore(AsyncStore):
    """The same, for an event loop: nothing ever waits."""

    def __init__(self, url: str = "memory://", *, memory: MemoryStore | None = None) -> None:
        """Use the records of *memory*, or start empty."""
        self._memory = memory or MemoryStore(url)
        self.notes_replays = self._memory.notes_replays

    def perform(self, command: Command[T]) -> Step[T]:
        """Carry out one store command."""
        answer: Step[T] = Step(loop=asyncio.get_running_loop())
        answer.settle(self._memory.act(command, self.actor))
        return answer

    def renew(self, command: Renew) -> frozenset[Hold]:
        """Renew leases, from any thread."""
        return self._memory.act(command, self.actor)

    def transaction(self) -> AsyncMemoryTransaction:
        """Return a transaction, without a connection."""
        return AsyncMemoryTransaction(self._memory, self.actor)

    def age(self, duration: timedelta) -> None:
        """Make everything older by *duration*. For tests."""
        self._memory.age(duration)

    async def open(self) -> None:
        """There is nothing to open."""

    async def close(self) -> None:
        """There is nothing else to close."""
        await self.ended.close()


def _audit(url: str) -> Audit:
    said = dict(parse_qsl(urlsplit(url).query, keep_blank_values=True)).get("audit", "on")
    for audit in AUDITS:
        if said == audit:
            return audit
    raise ConfigurationError(f"audit={said} is not known: it is {', '.join(AUDITS[:-1])} or {AUDITS[-1]}.")
