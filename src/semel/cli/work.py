"""``semel sweep``, ``reap`` and ``work``: the upkeep services, once or until stopped. The services are in ``work/``."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable
from queue import SimpleQueue
from typing import Annotated, Any, TypeVar

import typer

import semel.asgi
import semel.wsgi
from semel.cli.address import StoreOption, opened
from semel.cli.application import load, started
from semel.cli.metrics import MetricsOption, served
from semel.cli.output import JsonOption, counting, log_to_stderr
from semel.cli.relay import Destinations, KeepOption, LeaseOption, ToOption
from semel.core.commands import Command, Reaped
from semel.core.upkeep import MAX_ATTEMPTS, MAX_BATCH
from semel.errors import ConfigurationError
from semel.flows.receive import InboxReport
from semel.stores import Store
from semel.stores.dialect import keeps_messages
from semel.work import AsyncBacklog, AsyncWorkers, Backlog, InboxReaper, Plan, Reaper, Surveyor, Sweeper, Workers
from semel.work.backlog import CONCURRENCY, looks_every
from semel.work.plan import duration
from semel.work.service import ServicePorts, facts_of

AuditOption = Annotated[str, typer.Option(metavar="TIME", help="How long the audit trail is kept: 90d, 12h.")]
InboxOption = Annotated[
    str, typer.Option(metavar="TIME", help="How long receipts of handled messages are kept: 14d, 12h.")
]
BatchOption = Annotated[int, typer.Option(min=1, help="How many records one statement clears at most.")]

AppOption = Annotated[
    str | None,
    typer.Option(
        metavar="MODULE:NAME", help="The app, or what makes it: operations with a stored request are finished by it."
    ),
]

T = TypeVar("T")


class _Counting(ServicePorts):
    """Tells a terminal how many records its run has found so far: after a long standstill there may be millions."""

    count: Callable[[int], None]

    async def ask(self, command: Command[T]) -> T:
        """Ask the store, and count what came back."""
        outcome = await super().ask(command)
        if isinstance(outcome, Reaped):
            self.count(outcome.total)
        elif isinstance(outcome, tuple):
            self.count(len(outcome))
        return outcome


class _CountingSweeper(_Counting, Sweeper[Store]):
    """A sweeper that counts."""


class _CountingReaper(_Counting, Reaper[Store]):
    """A reaper that counts."""


STOPPING = (signal.SIGINT, signal.SIGTERM)


def sweep(
    *,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Free the keys of workers that died, once; park the operations that may not run again."""
    with opened(store) as keys, counting("Sweeping") as count:
        sweeper = _CountingSweeper(keys)
        sweeper.count = count
        report = sweeper.run_once()
    print(json.dumps(facts_of(report)) if as_json else report)
    if report.error is not None:  # A run that was cut short is a failure.
        raise report.error


def reap(
    *,
    store: StoreOption = None,
    audit_retention: AuditOption = "90d",
    inbox_retention: InboxOption = "14d",
    batch: BatchOption = MAX_BATCH,
    as_json: JsonOption = False,
) -> None:
    """Clear the records past their retention, once. Records in progress and parked ones stay."""
    kept, known = duration(audit_retention), duration(inbox_retention)
    with opened(store) as keys:
        with counting("Reaping") as count:
            reaper = _CountingReaper(keys, audit_retention=kept, batch=batch)
            reaper.count = count
            report = reaper.run_once()
        receipts = InboxReport()
        if report.error is None and keeps_messages(keys):
            receipts = InboxReaper(keys, retention=known, batch=batch).run_once()
    if as_json:
        print(json.dumps(facts_of(report) | {"inbox": facts_of(receipts)}))
    else:
        print(report)
        if not receipts.is_idle:
            print(receipts)
    if (error := report.error or receipts.error) is not None:
        raise error


def work(
    *,
    store: StoreOption = None,
    app: AppOption = None,
    sweep_every: Annotated[str, typer.Option(metavar="TIME", help="How often to look for stuck keys.")] = "10s",
    reap_every: Annotated[str, typer.Option(metavar="TIME", help="How often to clear expired keys.")] = "60s",
    complete_every: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="How often to look for operations to run: 1s if the app accepts, else 5s."),
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="How many operations are run at once.")] = CONCURRENCY,
    max_attempts: Annotated[
        int, typer.Option(min=1, help="How often an operation is tried before it is parked.")
    ] = MAX_ATTEMPTS,
    audit_retention: AuditOption = "90d",
    inbox_retention: InboxOption = "14d",
    batch: BatchOption = MAX_BATCH,
    to: ToOption = None,
    lease: LeaseOption = "30s",
    keep: KeepOption = None,
    metrics: MetricsOption = None,
) -> None:
    """Sweep and reap until SIGTERM or SIGINT. With --app, also run accepted and abandoned operations; with --to, relay.

    Any number of these may run at once. When one is told to stop, it begins nothing new and finishes its current runs.
    """
    plan = Plan(
        sweep_every=duration(sweep_every),
        reap_every=duration(reap_every),
        audit_retention=duration(audit_retention),
        inbox_retention=duration(inbox_retention),
        batch=batch,
        concurrency=concurrency,
        max_attempts=max_attempts,
    )
    every = duration(complete_every) if complete_every else None
    destinations = Destinations(to or (), duration(lease), None if keep is None else duration(keep))
    log_to_stderr()
    said = f"Sweeping every {sweep_every}, reaping every {reap_every}"
    if to:
        said += f", relaying to {', '.join(each.partition('=')[0] for each in to)}"
    if app is None:
        with opened(store) as keys, served(metrics) as is_measured:
            keys.open()
            services = [*plan.services(keys), *destinations.relays(keys), *([Surveyor(keys)] if is_measured else ())]
            _until_stopped(Workers(services), f"{said}. Ctrl-C ends it.")
        return
    if store is not None:
        raise ConfigurationError("Give --app or --store, not both: the app names its store.")
    loaded, middleware = load(app)
    middleware.workers = None  # Its own services would do the same work again in this process.
    is_accepting = middleware.guard.status_path is not None
    every = every or looks_every(is_accepting=is_accepting)
    looks = complete_every or f"{every.total_seconds():g}s"
    said = f"{said}, finishing every {looks}, {concurrency} at once. Ctrl-C ends it."
    with served(metrics) as is_measured:
        if isinstance(middleware, semel.asgi.IdempotencyMiddleware):
            waiting = AsyncBacklog(every, middleware.store.listen if is_accepting else None)
            services_on_loop = [
                *plan.services(middleware.store, middleware.finish, waiting),
                *destinations.relays(middleware.store),
                *([Surveyor(middleware.store)] if is_measured else ()),
            ]
            asyncio.run(_work_async(loaded, middleware, AsyncWorkers(services_on_loop), said))
        else:
            middleware.store.open()
            backlog = Backlog(every, middleware.store.listen if is_accepting else None)
            services = [
                *plan.services(middleware.store, middleware.finish, backlog),
                *destinations.relays(middleware.store),
                *([Surveyor(middleware.store)] if is_measured else ()),
            ]
            _until_stopped(Workers(services), said, middleware.drain)
            middleware.guard.close()
            middleware.store.close()


async def _work_async(app: Any, middleware: semel.asgi.IdempotencyMiddleware, workers: AsyncWorkers, said: str) -> None:
    loop, stopped = asyncio.get_running_loop(), asyncio.Queue[str]()
    for each in STOPPING:
        loop.add_signal_handler(each, stopped.put_nowait, each.name)
    async with started(app):
        workers.start()
        print(said, flush=True)
        name = await stopped.get()
        for each in STOPPING:  # A second signal ends the process at once.
            loop.remove_signal_handler(each)
        print(f"{name}: finishing the current runs.", flush=True)
        middleware.drain()
        await workers.stop()


def _until_stopped(workers: Workers, said: str, drain: Callable[[], None] = lambda: None) -> None:
    # A SimpleQueue, because its put() may be called in a signal handler. An Event's set() can deadlock there.
    signals: SimpleQueue[int] = SimpleQueue()
    before = {each: signal.signal(each, lambda number, _: signals.put(number)) for each in STOPPING}
    workers.start()
    print(said, flush=True)
    name = signal.Signals(signals.get()).name
    # A second signal ends the process at once.
    for each, handler in before.items():
        signal.signal(each, handler)
    print(f"{name}: finishing the current runs.", flush=True)
    drain()
    workers.stop()
