"""What telemetry adds to a request, in microseconds: ``python -m bench telemetry``. There is no HTTP and no database in
it: the app is driven in this process, on the memory store, so that the difference is not lost in what those take.
"""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from typing import Any

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from prometheus_client import CollectorRegistry

import semel.telemetry
from semel import SINGLE_TENANT
from semel.asgi import IdempotencyMiddleware, ports
from semel.core.events import Event
from semel.guard import measuring
from semel.telemetry.opentelemetry import OpenTelemetry
from semel.telemetry.prometheus import Prometheus

#: Goals, in microseconds of a request. A span is what the SDK takes, three of them for a first execution.
GOALS: dict[str, float | None] = {"off": 1.0, "Prometheus": 10.0, "OpenTelemetry": 10.0, "with spans": None}
REQUESTS = 25
ROUNDS = 200

BODY = b'{"amount": 100}'
_numbers = count()


@dataclass(frozen=True, slots=True)
class Row:
    """What one request takes, in microseconds: the least of all rounds, and what that is above no telemetry at all."""

    name: str
    first: float
    replay: float
    first_added: float
    replay_added: float
    goal: float | None


async def _app(_scope: Any, _receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 201, "headers": [(b"content-type", b"application/json")]})
    await send({"type": "http.response.body", "body": b"{}"})


async def _receive() -> dict[str, Any]:
    return {"type": "http.request", "body": BODY, "more_body": False}


async def _send(_message: Any) -> None:
    pass


async def _burst(app: IdempotencyMiddleware, key: Callable[[], bytes]) -> float:
    """Return the microseconds that a request takes."""
    scopes = [
        {
            "type": "http",
            "method": "POST",
            "path": "/payments",
            "raw_path": b"/payments",
            "query_string": b"",
            "root_path": "",
            "path_template": "/payments",
            "headers": [(b"idempotency-key", key()), (b"content-type", b"application/json")],
        }
        for _ in range(REQUESTS)
    ]
    began = time.process_time()
    for scope in scopes:
        await app(scope, _receive, _send)
    return (time.process_time() - began) / REQUESTS * 1e6


async def _pair(app: IdempotencyMiddleware) -> tuple[float, float]:
    """Return what a first execution takes, and a replay."""
    first = await _burst(app, lambda: b"key-%d" % next(_numbers))
    return first, await _burst(app, lambda: b"key-0")


def _bare(flow: Any) -> Any:
    """Stand in for the hook itself."""
    return flow


def _ignored(_event: Event) -> None:
    """Stand in for a sink that takes no time."""


@contextmanager
def _used(sink: Any) -> Iterator[None]:
    semel.telemetry.use(sink)
    try:
        yield
    finally:
        semel.telemetry.drop(sink)


@contextmanager
def _without() -> Iterator[None]:
    """Take the hook itself out."""
    ports.measured = _bare  # type: ignore[attr-defined]  # it is the name under which the ports have it
    try:
        yield
    finally:
        ports.measured = measuring.measured  # type: ignore[attr-defined]  # as above


def measure_telemetry() -> list[Row]:
    """Measure each, by turns, a few milliseconds at a time: a busy machine then leaves some of each alone."""
    return asyncio.run(_measure())


async def _measure() -> list[Row]:
    provider = TracerProvider()
    meters = MeterProvider([InMemoryMetricReader()])
    opentelemetry = OpenTelemetry(tracer_provider=provider, meter_provider=meters)
    prometheus = Prometheus(CollectorRegistry())
    tracer = provider.get_tracer("bench")
    ways: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "none": _without,
        "off": nullcontext,
        "a sink": partial(_used, _ignored),
        "Prometheus": partial(_used, prometheus),
        "OpenTelemetry": partial(_used, opentelemetry),
        "with spans": partial(_used, opentelemetry),
    }
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    app = IdempotencyMiddleware(_app, store="memory://", scope=SINGLE_TENANT)
    await _burst(app, lambda: b"key-%d" % next(_numbers))
    for _ in range(ROUNDS):
        gc.collect()
        gc.disable()
        await _pair(app)  # What comes first after a collection takes longer.
        for name, way in ways.items():
            server = tracer.start_as_current_span("server") if name == "with spans" else nullcontext()
            with way(), server:
                seen[name].append(await _pair(app))
        gc.enable()
    return _rows(seen)


def _rows(seen: Mapping[str, list[tuple[float, float]]]) -> list[Row]:
    # The least of all rounds: a busy machine only adds.
    least = {name: tuple(min(each) for each in zip(*pairs, strict=True)) for name, pairs in seen.items()}
    none_first, none_replay = least["none"]
    return [
        Row(name, first, replay, first - none_first, replay - none_replay, GOALS.get(name))
        for name, (first, replay) in least.items()
    ]


def as_json(rows: list[Row]) -> str:
    """Return the rows for machines."""
    return json.dumps([asdict(row) for row in rows])


def listed(rows: list[Row]) -> str:
    """Return the rows for people."""
    lines = [f"{'telemetry':<14} {'first':>9} {'added':>8} {'replay':>9} {'added':>8} {'goal':>6}   µs per request"]
    for row in rows:
        goal = "" if row.goal is None else f"{row.goal:.0f}"
        first, replay = f"{row.first:>9.1f} {row.first_added:>8.1f}", f"{row.replay:>9.1f} {row.replay_added:>8.1f}"
        lines.append(f"{row.name:<14} {first} {replay} {goal:>6}")
    return "\n".join(lines)
