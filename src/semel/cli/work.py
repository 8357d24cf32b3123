"""``semel sweep``, ``reap`` and ``work``: cleaning up, once or for ever. What the services do is in ``work/``."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue
from typing import Annotated, Any

import typer

import semel.asgi
from semel.cli.address import StoreOption, opened
from semel.cli.application import load, started
from semel.cli.durations import duration
from semel.cli.output import JsonOption
from semel.core.upkeep import MAX_BATCH
from semel.errors import ConfigurationError
from semel.flows.upkeep import ReapReport, SweepReport
from semel.stores import AsyncStore, Store
from semel.work import (
    AsyncCompleter,
    AsyncReaper,
    AsyncService,
    AsyncSweeper,
    AsyncWorkers,
    Completer,
    Reaper,
    Service,
    Sweeper,
    Workers,
)

AuditOption = Annotated[str, typer.Option(metavar="TIME", help="How long the audit trail is kept: 90d, 12h.")]
BatchOption = Annotated[int, typer.Option(min=1, help="How many records one statement clears away at most.")]

AppOption = Annotated[
    str | None,
    typer.Option(metavar="MODULE:NAME", help="The app, to finish operations with whose request was kept."),
]

STOPPING = (signal.SIGINT, signal.SIGTERM)


def sweep(
    *,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Free the keys of workers that died, once; park the operations that may not run again."""
    with opened(store) as keys:
        _put(Sweeper(keys).run_once(), as_json=as_json)


def reap(
    *,
    store: StoreOption = None,
    audit_retention: AuditOption = "90d",
    batch: BatchOption = MAX_BATCH,
    as_json: JsonOption = False,
) -> None:
    """Clear away what is past its retention, once. Nothing in flight and nothing parked is touched."""
    kept = duration(audit_retention)
    with opened(store) as keys:
        _put(Reaper(keys, audit_retention=kept, batch=batch).run_once(), as_json=as_json)


def work(
    *,
    store: StoreOption = None,
    app: AppOption = None,
    sweep_every: Annotated[str, typer.Option(metavar="TIME", help="How often stuck keys are looked for.")] = "10s",
    reap_every: Annotated[str, typer.Option(metavar="TIME", help="How often expired keys are cleared away.")] = "60s",
    complete_every: Annotated[str, typer.Option(metavar="TIME", help="How often abandoned work is looked for.")] = "5s",
    audit_retention: AuditOption = "90d",
    batch: BatchOption = MAX_BATCH,
) -> None:
    """Sweep and reap until SIGTERM or SIGINT; with --app, also finish operations whose client never came back.

    Any number of these may run at once.
    """
    plan = _Plan(
        duration(sweep_every), duration(reap_every), duration(complete_every), duration(audit_retention), batch
    )
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    said = f"Sweeping every {sweep_every}, reaping every {reap_every}"
    if app is None:
        with opened(store) as keys:
            keys.open()
            _until_stopped(Workers(plan.services(keys)), f"{said}. Ctrl-C ends it.")
        return
    if store is not None:
        raise ConfigurationError("Give --app or --store, not both: the app names its store.")
    loaded, middleware = load(app)
    middleware.workers = None  # Its own would do the same once more, in this very process.
    said = f"{said}, finishing every {complete_every}. Ctrl-C ends it."
    if isinstance(middleware, semel.asgi.IdempotencyMiddleware):
        asyncio.run(_work_async(loaded, middleware, plan, said))
    else:
        middleware.store.open()
        completer = Completer(middleware.store, middleware.finish, interval=plan.complete)
        services = [*plan.services(middleware.store, has_completer=True), completer]
        _until_stopped(Workers(services), said, middleware.drain)
        middleware.store.close()


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What was typed."""

    sweep: timedelta
    reap: timedelta
    complete: timedelta
    audit_retention: timedelta
    batch: int

    def services(self, keys: Store, *, has_completer: bool = False) -> list[Service]:
        return [
            Sweeper(keys, interval=self.sweep, has_completer=has_completer),
            Reaper(keys, interval=self.reap, audit_retention=self.audit_retention, batch=self.batch),
        ]

    def async_services(self, keys: AsyncStore) -> list[AsyncService]:
        return [
            AsyncSweeper(keys, interval=self.sweep, has_completer=True),
            AsyncReaper(keys, interval=self.reap, audit_retention=self.audit_retention, batch=self.batch),
        ]


async def _work_async(app: Any, middleware: semel.asgi.IdempotencyMiddleware, plan: _Plan, said: str) -> None:
    loop, stopped = asyncio.get_running_loop(), asyncio.Queue[str]()
    for each in STOPPING:
        loop.add_signal_handler(each, stopped.put_nowait, each.name)
    async with started(app):
        keys = middleware.store
        completer = AsyncCompleter(keys, middleware.finish, interval=plan.complete)
        workers = AsyncWorkers([*plan.async_services(keys), completer])
        workers.start()
        print(said, flush=True)
        name = await stopped.get()
        for each in STOPPING:  # A second signal ends the process there and then.
            loop.remove_signal_handler(each)
        print(f"{name}: ending the runs under way.", flush=True)
        middleware.drain()
        await workers.stop()


def _until_stopped(workers: Workers, said: str, drain: Callable[[], None] = lambda: None) -> None:
    # A SimpleQueue, because its put() may be called in a signal handler. An Event's set() can deadlock there.
    signals: SimpleQueue[int] = SimpleQueue()
    before = {each: signal.signal(each, lambda number, _: signals.put(number)) for each in STOPPING}
    workers.start()
    print(said, flush=True)
    name = signal.Signals(signals.get()).name
    # A second signal ends the process there and then.
    for each, handler in before.items():
        signal.signal(each, handler)
    print(f"{name}: ending the runs under way.", flush=True)
    drain()
    workers.stop()


def _put(report: SweepReport | ReapReport, *, as_json: bool) -> None:
    """Print *report*; a run that was cut short is a failure."""
    if as_json:
        facts: dict[str, Any] = {each.name: getattr(report, each.name) for each in dataclasses.fields(report)}
        print(json.dumps(facts | {"error": str(report.error) if report.error else None}))
    else:
        print(report)
    if report.error is not None:
        raise report.error
