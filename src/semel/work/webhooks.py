"""Relays webhooks to all endpoints of a store: one relay for each that has something to send, side by side. How a
webhook is sent is in ``publishers/webhook.py``, which endpoints there are in ``webhooks/``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Container
from datetime import timedelta
from typing import Any

from semel.core.value import value
from semel.errors import SemelError, StoreError
from semel.flows.relay import RelayReport
from semel.stores import AsyncStore
from semel.stores.dialect import messages_of
from semel.stores.outbox import OutboxStatements, carry_out
from semel.webhooks.directory import WebhookDirectory
from semel.work.relay import LEASE, POLLS, AsyncRelay
from semel.work.service import StoreService

#: How many endpoints are sent to at once: most of them wait for others.
CONCURRENCY = 50
#: How long one of them is sent to before others that wait have its place: an endpoint that hangs, with thousands of
#: webhooks to get, would have it for hours.
TURN = timedelta(seconds=1)


@value
class WebhooksReport:
    """What came of the runs that have ended since the last report."""

    #: How many endpoints are on.
    endpoints: int = 0
    sent: int = 0
    retried: int = 0
    dead: int = 0
    unreachable: int = 0
    error: SemelError | None = None

    def __str__(self) -> str:
        """Say it in one line."""
        counts = f"webhooks: {self.sent} sent, {self.retried} to be tried again, {self.dead} dead"
        counts += f", {self.unreachable} of {self.endpoints} endpoints not reached"
        return counts + (f"; {self.error}" if self.error else "")

    @property
    def is_idle(self) -> bool:
        """Whether there was nothing to do."""
        return not (self.sent or self.retried or self.dead or self.unreachable or self.error)


class Webhooks(StoreService[AsyncStore, WebhooksReport]):
    """Serves every endpoint that is on. It needs an event loop."""

    name = "webhooks"

    def __init__(
        self, store: AsyncStore, *, lease: timedelta = LEASE, keep: timedelta | None = None, **settings: Any
    ) -> None:
        """Send to the endpoints in *store*; *settings* are those of ``WebhookDirectory``."""
        super().__init__(store, timedelta(seconds=POLLS[-1]))
        self._store_on_loop = store
        self._directory = WebhookDirectory(store, **settings)
        self._statements = OutboxStatements(messages_of(store, "outbox"))
        self._lease, self._keep = lease, keep
        self._relays: dict[str, AsyncRelay] = {}
        self._running: dict[str, asyncio.Task[RelayReport]] = {}
        self._idle_runs = 0

    @property
    def interval(self) -> timedelta:
        """How long until the next look."""
        return timedelta(seconds=POLLS[min(self._idle_runs + 3, len(POLLS) - 1)])

    def look_again(self) -> None:
        """Read the table of endpoints with the next run, however fresh it is."""
        self._directory.forget()

    def stop(self) -> None:
        """Begin nothing new."""
        for relay in self._relays.values():
            relay.stop()

    async def flow(self, ports: Webhooks) -> WebhooksReport:  # noqa: ARG002 - it is the same
        """Begin to send to the endpoints that have something waiting, and report of those that are done."""
        try:
            report = await self._round()
        except StoreError as error:
            report = WebhooksReport(error=error)
        is_idle = (report.is_idle and not self._running) or report.error is not None
        self._idle_runs = self._idle_runs + 1 if is_idle else 0
        return report

    async def send_all(self) -> WebhooksReport:
        """Send what is there now, each endpoint's in its turn, and report of all of it."""
        total = WebhooksReport()
        while True:
            report = await self.run_once()
            total = WebhooksReport(
                report.endpoints,
                total.sent + report.sent,
                total.retried + report.retried,
                total.dead + report.dead,
                total.unreachable + report.unreachable,
                report.error,
            )
            if report.error is not None or (report.is_idle and not self._running):
                return total

    async def _round(self) -> WebhooksReport:
        endpoints = await self._directory.endpoints(time.monotonic())
        for name in [name for name in self._relays if name not in endpoints and name not in self._running]:
            await self._relays.pop(name).close()
        for name in endpoints:
            publisher = self._directory.publisher(endpoints[name])
            relay = self._relays.get(name)
            if relay is None or (relay.publisher is not publisher and name not in self._running):
                self._relays[name] = AsyncRelay(
                    self._store_on_loop,
                    name,
                    publisher,
                    lease=self._lease,
                    keep=self._keep,
                    batch=publisher.batch,
                    turn=TURN,
                    is_woken=False,
                )
        waiting = [name for name in self._relays if self._may_run(name, endpoints)]
        pending = frozenset(await self._pending(waiting))
        for name in waiting:
            if name in pending and len(self._running) < CONCURRENCY:
                # Those that had a turn come last.
                relay = self._relays[name] = self._relays.pop(name)
                self._running[name] = asyncio.ensure_future(relay.run_once())
        if self._running:
            await asyncio.wait(self._running.values(), timeout=POLLS[3])
        return self._report(len(endpoints))

    def _may_run(self, name: str, endpoints: Container[str]) -> bool:
        return name in endpoints and name not in self._running and not self._relays[name].is_left_alone

    async def let_go(self) -> None:
        """Wait for what is under way, and disconnect."""
        if self._running:
            await asyncio.wait(self._running.values())
        for relay in self._relays.values():
            await relay.close()
        await self._directory.close()

    async def _pending(self, names: list[str]) -> list[str]:
        if not names:
            return []
        after = [self._relays[name].safe_place for name in names]
        return await carry_out(self._store, self._statements.pending(names, after))

    def _report(self, endpoints: int) -> WebhooksReport:
        sent = retried = dead = unreachable = 0
        error: SemelError | None = None
        for name, task in [(name, task) for name, task in self._running.items() if task.done()]:
            del self._running[name]
            report = task.result()
            sent, retried, dead = sent + report.sent, retried + report.retried, dead + report.dead
            unreachable += report.unreachable is not None
            if isinstance(report.error, StoreError):
                error = report.error
        return WebhooksReport(endpoints, sent, retried, dead, unreachable, error)
