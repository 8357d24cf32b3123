"""``semel relay``: sends the messages of an outbox until it is stopped. What it sends with is in ``publishers/``."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from semel.cli.address import StoreOption, async_made
from semel.cli.metrics import MetricsOption, served
from semel.cli.output import JsonOption, log_to_stderr
from semel.core.outbox import check_name
from semel.errors import ConfigurationError
from semel.flows.relay import MAX_BATCH, RelayReport
from semel.publishers import Publisher, publisher
from semel.stores import AsyncStore, Store
from semel.work import AsyncWorkers
from semel.work.plan import duration
from semel.work.relay import Relay
from semel.work.service import AsyncService, facts_of

if TYPE_CHECKING:
    from semel.work.webhooks import Webhooks, WebhooksReport

S = TypeVar("S", bound=Store | AsyncStore)

STOPPING = (signal.SIGINT, signal.SIGTERM)

ToOption = Annotated[
    list[str] | None,
    typer.Option(
        "--to", metavar="NAME=URL", help="A destination of messages, and where it is: events=amqp://host/. Repeatable."
    ),
]
LeaseOption = Annotated[
    str, typer.Option(metavar="TIME", help="How long a relay that is silent keeps what it has taken.")
]
KeepOption = Annotated[
    str | None, typer.Option(metavar="TIME", help="Keep messages so long after they were sent. Without: not at all.")
]
RelayBatchOption = Annotated[int, typer.Option("--batch", min=1, help="How many messages are taken at once at most.")]


@dataclass(frozen=True)
class Destinations:
    """What was typed about where to send."""

    to: Sequence[str]
    lease: timedelta
    keep: timedelta | None
    batch: int = MAX_BATCH

    def relays(self, store: S) -> list[Relay[S]]:
        """Return a relay for each."""
        given = dict(_split(each) for each in self.to)
        if len(given) < len(self.to):
            raise ConfigurationError("A destination was given twice. Give each --to NAME once.")
        made: dict[str, Publisher] = {name: publisher(name, url) for name, url in given.items()}
        return [
            Relay(store, name, each, lease=self.lease, batch=self.batch, keep=self.keep) for name, each in made.items()
        ]


def relay(
    *,
    to: ToOption = None,
    store: StoreOption = None,
    lease: LeaseOption = "30s",
    keep: KeepOption = None,
    batch: RelayBatchOption = MAX_BATCH,
    webhooks: Annotated[
        bool, typer.Option("--webhooks", help="Also send to all endpoints of webhooks (semel webhooks list).")
    ] = False,
    allow_private: Annotated[
        bool, typer.Option("--allow-private", help="Let endpoints be in this network: for tests and intranets.")
    ] = False,
    once: Annotated[bool, typer.Option("--once", help="Send what is there now, and end.")] = False,
    as_json: JsonOption = False,
    metrics: MetricsOption = None,
) -> None:
    """Send the messages of the outbox until SIGTERM or SIGINT.

    Any number of these may run at once. When one is told to stop, it hands back what it has not begun to send.
    """
    if not to and not webhooks:
        raise ConfigurationError("Where to? Give --to NAME=URL, as in --to events=amqp://localhost/, or --webhooks.")
    destinations = Destinations(to or (), duration(lease), None if keep is None else duration(keep), batch)
    log_to_stderr()
    to_webhooks = {"allow_private": allow_private} if webhooks else None
    with served(metrics):
        reports = asyncio.run(_relay(store, destinations, once=once, webhooks=to_webhooks))
    if as_json:
        print(json.dumps([facts_of(report) for report in reports]))
    else:
        print(*reports, sep="\n", end="\n" if reports else "")
    failed = next((report for report in reports if report.error or report.unreachable), None)
    if isinstance(failed, RelayReport):
        raise failed.error or ConfigurationError(f"{failed.to} can't be reached: {failed.unreachable}")
    if failed is not None:
        raise failed.error or ConfigurationError("An endpoint can't be reached. Why, the lines above say.")


async def _relay(
    url: str | None, destinations: Destinations, *, once: bool, webhooks: dict[str, Any] | None
) -> list[RelayReport | WebhooksReport]:
    store = async_made(url)
    relays = destinations.relays(store)
    names = ", ".join(each.to for each in relays)
    endpoints: list[Webhooks] = []
    if webhooks is not None:
        from semel.work.webhooks import Webhooks  # noqa: PLC0415 - its client is an extra

        endpoints = [Webhooks(store, lease=destinations.lease, keep=destinations.keep, **webhooks)]
        names = f"{names} and the endpoints of webhooks" if names else "the endpoints of webhooks"
    services: list[AsyncService] = [*relays, *endpoints]
    try:
        await store.open()
        if once:
            try:
                return [await each.run_once() for each in relays] + [await each.send_all() for each in endpoints]
            finally:
                for service in (*relays, *endpoints):
                    await service.close()
        await _until_stopped(AsyncWorkers(services), names)
    finally:
        await store.close()
    return []


async def _until_stopped(workers: AsyncWorkers, names: str) -> None:
    loop, stopped = asyncio.get_running_loop(), asyncio.Queue[str]()
    for each in STOPPING:
        loop.add_signal_handler(each, stopped.put_nowait, each.name)
    workers.start()
    print(f"Relaying to {names}. Ctrl-C ends it.", flush=True)
    name = await stopped.get()
    for each in STOPPING:  # A second signal ends the process at once.
        loop.remove_signal_handler(each)
    print(f"{name}: handing back what was not begun.", flush=True)
    await workers.stop()


def _split(text: str) -> tuple[str, str]:
    name, equals, url = text.partition("=")
    if not equals or not name or not url:
        raise ConfigurationError("--to is NAME=URL, as in --to events=amqp://localhost/.")
    return check_name("A destination", name), url
