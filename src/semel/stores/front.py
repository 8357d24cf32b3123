"""A store in front of another one, which has the records: what both colours hand through. It changes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from semel.core.commands import Renew
from semel.core.record import Hold
from semel.stores.base import AsyncStore, Store
from semel.stores.dialect import Dialect
from semel.stores.migration import Layout, PlannedMigration


class _Front:
    """What a sync and an async one share."""

    durable: Any

    @property
    def actor(self) -> str | None:
        """The actor in the audit trail; None is this process."""
        actor: str | None = self.durable.actor
        return actor

    @actor.setter
    def actor(self, actor: str | None) -> None:
        self.durable.actor = actor

    @property
    def notes_replays(self) -> bool:
        """Whether the durable store's audit trail has a line for every replay, too."""
        notes: bool = self.durable.notes_replays
        return notes

    @property
    def decrypts(self) -> bool:
        """Whether it answers what is stored encrypted."""
        decrypts: bool = self.durable.decrypts
        return decrypts

    @property
    def ended(self) -> Any:
        """How many requests of this process have ended how: the durable store has the counts."""
        return self.durable.ended

    @property
    def dialect(self) -> Dialect | None:
        """The durable store's database."""
        dialect: Dialect | None = self.durable.dialect
        return dialect

    def check_transactions(self) -> None:
        """Raise if the durable store has none."""
        self.durable.check_transactions()

    def listen(self, on_end: Callable[[str], None]) -> None:
        """Let the durable store call *on_end*."""
        self.durable.listen(on_end)

    def watch(self, on_loss: Callable[[], None]) -> None:
        """Let the durable store call *on_loss*."""
        self.durable.watch(on_loss)


class StoreFront(_Front, Store):  # type: ignore[override]  # what it has of the durable store: properties
    """In front of a store for threads."""

    durable: Store

    @property
    def migrates_post(self) -> bool:
        """Whether ``migrate`` and ``plan`` take up the migrations that old code does not survive, too."""
        return self.durable.migrates_post

    @migrates_post.setter
    def migrates_post(self, with_post: bool) -> None:
        self.durable.migrates_post = with_post

    @property
    def is_callers(self) -> bool:  # type: ignore[override]  # it is the durable store's
        """Whether commands use the calling thread's own connection, which is the application's."""
        return self.durable.is_callers

    def renewals(self) -> Callable[[Renew], frozenset[Hold]]:
        """Return what renews leases in the durable store."""
        return self.durable.renewals()

    def open(self) -> None:
        """Open the durable store."""
        self.durable.open()

    def ping(self) -> None:
        """Ping the durable store: what is in front of it may be away."""
        self.durable.ping()

    def migrate(self) -> list[str]:
        """Bring the durable store's schema up to date; return what was applied."""
        return self.durable.migrate()

    def plan(self) -> tuple[PlannedMigration, ...]:
        """Return what ``migrate`` would do to the durable store."""
        return self.durable.plan()

    def lay_out(self, layout: Layout) -> list[str]:
        """Change the layout of the durable store; return what to tell people."""
        return self.durable.lay_out(layout)

    def plan_layout(self, layout: Layout) -> tuple[PlannedMigration, ...]:
        """Return what ``lay_out`` would do."""
        return self.durable.plan_layout(layout)

    def has_neighbours(self) -> bool:
        """Whether the durable store's database has other tables."""
        return self.durable.has_neighbours()

    def close(self) -> None:
        """Close every connection."""
        self.durable.close()


class AsyncStoreFront(_Front, AsyncStore):  # type: ignore[override]  # what it has of the durable store: properties
    """In front of a store for an event loop."""

    durable: AsyncStore

    def renew(self, command: Renew) -> frozenset[Hold]:
        """Renew leases, from any thread, in the durable store alone."""
        return self.durable.renew(command)

    def start_in_thread(self, call: Callable[[], Any]) -> asyncio.Future[Any]:
        """Start a plain function in the durable store's thread."""
        return self.durable.start_in_thread(call)

    async def open(self) -> None:
        """Open the durable store."""
        await self.durable.open()

    async def ping(self) -> None:
        """Ping the durable store: what is in front of it may be away."""
        await self.durable.ping()

    async def close(self) -> None:
        """Close every connection."""
        await self.durable.close()
