"""The inbox's reaper: deletes the receipts of handled messages that are past retention. It touches no message that
fails, and none that is parked.
"""

from __future__ import annotations

from datetime import timedelta

from semel.core.inbox import INBOX_RETENTION
from semel.core.upkeep import MAX_BATCH
from semel.flows.ports import Ports
from semel.flows.receive import InboxReport, reap_inbox
from semel.stores import AsyncStore
from semel.work.reaper import REAP_INTERVAL
from semel.work.service import S_co, StoreService


class InboxReaper(StoreService[S_co, InboxReport]):
    """Reaps the inbox of a store, for all of its consumers."""

    name = "inbox reaper"

    def __init__(
        self,
        store: S_co,
        *,
        interval: timedelta = REAP_INTERVAL,
        retention: timedelta = INBOX_RETENTION,
        batch: int = MAX_BATCH,
    ) -> None:
        """Delete what is older than *retention*: longer than any broker redelivers, or a message is handled twice."""
        super().__init__(store, interval)
        self._retention = retention
        self._batch = batch

    async def flow(self, ports: Ports) -> InboxReport:
        """Delete all that is past retention now."""
        return await reap_inbox(ports, self._retention, self._batch)


class AsyncInboxReaper(InboxReaper[AsyncStore]):
    """The same, of a store for an event loop."""
