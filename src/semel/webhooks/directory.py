"""The endpoints of webhooks as destinations of a relay. It decides on no try and no pause: the relay does.

How a relay uses it, on its event loop:

    directory = WebhookDirectory(store)                       # an AsyncStore, on the loop of its AsyncRelays
    endpoints = await directory.endpoints(now)                # {name: Endpoint}, those that are on; asked every round
    publisher = directory.publisher(endpoints["acme"])        # a Publisher: the same one until URL or secrets change
    relay = AsyncRelay(store, "acme", publisher, batch=publisher.batch)
    await directory.close()

*now* is the relay's own clock, in seconds; the table is read again when ten have passed. A destination that is not in
the answer any more is not served: its messages wait. A publisher notes in the table how its tries end, so nothing more
is to be reported. An endpoint that is turned off while messages are on their way leaves the rest ``Unreachable``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from semel.core.delivery import Answered, Endpoint
from semel.core.events import EndpointTurnedOff
from semel.core.outbox import Delivered, Failed, Message, Rejected, Schedule, Unreachable, Verdict
from semel.errors import ConfigurationError, StoreError
from semel.publishers.webhook import TIMEOUT, Webhook
from semel.telemetry.stream import tell
from semel.webhooks.endpoints import PATIENCE, AsyncEndpoints

#: How long the table's content is used. What an operator changes takes effect after that.
FRESH_SECONDS = 10.0
#: How often a failing endpoint is noted as failing. What counts is days.
NOTE_SECONDS = 60.0


class WebhookDirectory:
    """The endpoints in a store, and a publisher for each."""

    def __init__(
        self,
        store: Any,
        *,
        allow_private: bool = False,
        timeout: timedelta = TIMEOUT,
        patience: timedelta = PATIENCE,
        **settings: Any,
    ) -> None:
        """Read the endpoints in *store*, an ``AsyncStore`` or its URL. *allow_private* lets all of them be in the own
        network; the other *settings* are those of ``Webhook``.
        """
        self.table = AsyncEndpoints(store)
        self.patience = patience
        self._settings = {"allow_private": allow_private, "timeout": timeout, **settings}
        self._read_at: float | None = None
        self._endpoints: dict[str, Endpoint] = {}
        self._publishers: dict[str, EndpointPublisher] = {}
        self._retired: list[EndpointPublisher] = []

    async def endpoints(self, now: float) -> dict[str, Endpoint]:
        """Return the endpoints that are on, by name, as they were at most ten seconds before *now*."""
        if self._read_at is None or not 0 <= now - self._read_at < FRESH_SECONDS:
            self._endpoints = {each.name: each for each in await self.table.list() if each.is_on}
            self._read_at = now
            for name, publisher in [*self._publishers.items()]:
                publisher.refresh(self._endpoints.get(name))
                if name not in self._endpoints:
                    self._retired.append(self._publishers.pop(name))
            await self._close_retired()
        return dict(self._endpoints)

    def forget(self) -> None:
        """Read the table again when it is next asked for."""
        self._read_at = None

    def publisher(self, endpoint: Endpoint) -> EndpointPublisher:
        """Return the publisher of *endpoint*: another one if its URL or its secrets have changed."""
        found = self._publishers.get(endpoint.name)
        if found is None or not found.serves(endpoint):
            if found is not None:
                self._retired.append(found)
            found = self._publishers[endpoint.name] = EndpointPublisher(self, endpoint, self._webhook(endpoint))
        return found

    def _webhook(self, endpoint: Endpoint) -> Webhook | str:
        try:
            return Webhook(endpoint.name, endpoint.url, secrets=endpoint.secrets, **self._settings)
        except ConfigurationError as error:
            return str(error)

    async def close(self) -> None:
        """Disconnect from all endpoints, and from the store, if it was not given."""
        publishers, self._publishers = [*self._publishers.values(), *self._retired], {}
        self._retired = []
        for publisher in publishers:
            await publisher.close()
        await self.table.close()

    async def _close_retired(self) -> None:
        """Disconnect those that another has taken the place of, when their last try has ended."""
        idle = [each for each in self._retired if not each.is_busy]
        self._retired = [each for each in self._retired if each.is_busy]
        for publisher in idle:
            await publisher.close()


class EndpointPublisher:
    """Sends to one endpoint of the table, and notes there how that went."""

    schedule: Schedule = Webhook.schedule
    batch: int = Webhook.batch

    def __init__(self, directory: WebhookDirectory, endpoint: Endpoint, webhook: Webhook | str) -> None:
        """Send by *webhook*; a text says why there is none."""
        self._directory = directory
        self._endpoint = endpoint
        self._webhook = webhook
        if isinstance(webhook, Webhook):
            self.limit = webhook.limit
        self._is_failing = endpoint.failing_since is not None
        self._noted_at: float | None = None
        self._why_off: str | None = None
        self._calls = 0

    @property
    def is_busy(self) -> bool:
        """Whether a try is under way."""
        return self._calls > 0

    def serves(self, endpoint: Endpoint) -> bool:
        """Whether this is the publisher for the *endpoint* as it is now."""
        mine = self._endpoint
        return (mine.name, mine.url, mine.secrets) == (endpoint.name, endpoint.url, endpoint.secrets)

    def refresh(self, endpoint: Endpoint | None) -> None:
        """Take over what the table says by now; None: the endpoint is off, or gone."""
        if endpoint is None:
            self._why_off = self._why_off or "it was turned off, or removed"
        elif self.serves(endpoint):
            self._why_off = None
            self._is_failing = endpoint.failing_since is not None

    async def open(self) -> None:
        """Do nothing: an endpoint that is set up wrongly says so in its tries, and must not stop the relay."""

    async def publish(self, messages: Sequence[Message]) -> Sequence[Verdict]:
        """Send *messages*, unless the endpoint is off by now, and note how it went."""
        if self._why_off is not None:
            return [Unreachable(f"The endpoint gets no webhooks: {self._why_off}.")] * len(messages)
        self._calls += 1
        try:
            if isinstance(self._webhook, str):
                tries: Sequence[Answered] = [Answered(Unreachable(self._webhook))] * len(messages)
            else:
                tries = await self._webhook.deliver(messages)
            await self._note(tries)
        except StoreError:
            # The relay is about to write to the same store, and reports what is wrong with it. The next try is noted.
            self._noted_at = None
        finally:
            self._calls -= 1
        return [each.verdict for each in tries]

    async def close(self) -> None:
        """Disconnect."""
        if isinstance(self._webhook, Webhook):
            await self._webhook.close()

    async def _note(self, tries: Sequence[Answered]) -> None:
        table, endpoint = self._directory.table, self._endpoint
        if (why := next((each.turns_off for each in tries if each.turns_off), None)) is not None:
            self._turned_off(why)
            await table.turn_off(endpoint, why)
        elif any(isinstance(each.verdict, Delivered) for each in tries):
            if self._is_failing:
                await table.note_success(endpoint)
                self._is_failing = False
        elif (reason := _reason(tries)) is not None and self._is_to_be_noted():
            days = self._directory.patience / timedelta(days=1)
            told = f"It has taken no webhook for {days:g} days. The last try: {reason}"
            noted = await table.note_failure(endpoint, told, self._directory.patience)
            self._is_failing = True
            if noted is not None and not noted.is_on:
                self._turned_off(told)

    def _is_to_be_noted(self) -> bool:
        now = asyncio.get_running_loop().time()
        if self._is_failing and self._noted_at is not None and now - self._noted_at < NOTE_SECONDS:
            return False
        self._noted_at = now
        return True

    def _turned_off(self, why: str) -> None:
        if self._why_off is None:
            tell(EndpointTurnedOff(self._endpoint.name, why))
        self._why_off = why.rstrip(".")


def _reason(tries: Sequence[Answered]) -> str | None:
    """Return what a failed try has said, if there was one."""
    reasons = (each.verdict.reason for each in tries if isinstance(each.verdict, Failed | Unreachable | Rejected))
    return next(reasons, None)
