"""What telemetry adds to a request, in microseconds: ``python -m bench telemetry``. There is no HTTP and no database in
it: the app is driven in this process, on the memory store, so that the difference is not lost in what those take.

It is measured twice. In an app, where code and data come from a cache that the rest of the request has filled; on a
busy machine that is mostly noise. And alone: the meter and the sink around a flow that does nothing, over ports that
answer at once, in bursts of a tenth of a millisecond, of which some are left alone on any machine.
"""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from datetime import timedelta
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
from semel.core.commands import Claim, Complete
from semel.core.events import Event as Told
from semel.core.handler import RunHandler
from semel.core.message import Answer
from semel.core.record import Found, Hold
from semel.core.state import Event, State
from semel.flows.reply import Send
from semel.guard import measuring
from semel.telemetry.opentelemetry import OpenTelemetry
from semel.telemetry.prometheus import Prometheus

#: Goals, in microseconds of a request. What OpenTelemetry takes is its SDK's: 5 to 10 for each of up to three times,
#: and 14 for each of up to three spans.
GOALS: Mapping[str, float | None] = {"off": 1.0, "Prometheus": 10.0}
REQUESTS = 25
ROUNDS = 200
ALONE_REQUESTS = 20
ALONE_ROUNDS = 300

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


def _ignored(_event: Told) -> None:
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


def measure_telemetry() -> tuple[list[Row], list[Row]]:
    """Measure each, by turns, a few milliseconds at a time: in an app, and alone."""
    return asyncio.run(_measure()), asyncio.run(_measure_alone())


_CLAIM = Claim("scope", "key", bytes(16), b"", timedelta(seconds=30), timedelta(hours=1))
_HOLD = Hold("scope", "key", 1, bytes(16))
_ANSWER = Answer(201, (), b"{}")
_COMPLETE = Complete(_HOLD, Event.COMPLETE, _ANSWER)
_RUN = RunHandler(_HOLD, timedelta(seconds=30), 1000)
_FOUND = Found(State.COMPLETE, 1, bytes(16), b"", _ANSWER, lease_is_over=True, is_expired=False)


class _Ports:
    """Ports that answer at once; *claimed* is what a claim brings."""

    door = "asgi"

    def __init__(self, claimed: Hold | Found) -> None:
        self._claimed = claimed

    def endpoint(self) -> str:
        return "POST /payments"

    async def claim(self, _claim: Claim) -> Hold | Found:
        return self._claimed

    async def run_handler(self, _run: RunHandler) -> None:
        pass

    async def ask(self, _command: Complete) -> None:
        pass


async def _first(ports: Any) -> Send:
    await ports.claim(_CLAIM)
    await ports.run_handler(_RUN)
    await ports.ask(_COMPLETE)
    return Send(_ANSWER, "ran")


async def _replay(ports: Any) -> Send:
    await ports.claim(_CLAIM)
    return Send(_ANSWER, "replayed")


async def _measure_alone() -> list[Row]:
    seen: dict[str, list[tuple[float, float]]] = {}
    ways = _ways()
    del ways["none"]  # The hook is asked for once, and not in here.
    for _ in range(ALONE_ROUNDS):
        gc.collect(0)
        gc.disable()
        for name, (way, server) in ways.items():
            with way(), server():
                first = await _burst_alone(measuring.measured(_first), _Ports(_HOLD))
                replay = await _burst_alone(measuring.measured(_replay), _Ports(_FOUND))
                seen.setdefault(name, []).append((first, replay))
        gc.enable()
    return _rows(seen, "off")


async def _burst_alone(flow: Callable[[Any], Any], ports: _Ports) -> float:
    began = time.perf_counter()
    for _ in range(ALONE_REQUESTS):
        await flow(ports)
    return (time.perf_counter() - began) / ALONE_REQUESTS * 1e6


_Way = Callable[[], AbstractContextManager[Any]]


def _ways() -> dict[str, tuple[_Way, _Way]]:
    """Return the ways to be told, each with the span around it."""
    provider = TracerProvider()
    meters = MeterProvider([InMemoryMetricReader()])
    opentelemetry = OpenTelemetry(tracer_provider=provider, meter_provider=meters)
    prometheus = Prometheus(CollectorRegistry())
    tracer = provider.get_tracer("bench")
    return {
        "none": (_without, nullcontext),
        "off": (nullcontext, nullcontext),
        "a sink": (partial(_used, _ignored), nullcontext),
        "Prometheus": (partial(_used, prometheus), nullcontext),
        "OpenTelemetry": (partial(_used, opentelemetry), nullcontext),
        "with spans": (partial(_used, opentelemetry), partial(tracer.start_as_current_span, "server")),
    }


async def _measure() -> list[Row]:
    ways = _ways()
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    app = IdempotencyMiddleware(_app, store="memory://", scope=SINGLE_TENANT)
    await _burst(app, lambda: b"key-%d" % next(_numbers))
    for _ in range(ROUNDS):
        gc.collect()
        gc.disable()
        await _pair(app)  # What comes first after a collection takes longer.
        for name, (way, server) in ways.items():
            with way(), server():
                seen[name].append(await _pair(app))
        gc.enable()
    return _rows(seen, "none")


def _rows(seen: Mapping[str, list[tuple[float, float]]], without: str) -> list[Row]:
    # The least of all rounds: a busy machine only adds.
    least = {name: tuple(min(each) for each in zip(*pairs, strict=True)) for name, pairs in seen.items()}
    none_first, none_replay = least[without]
    return [
        Row(name, first, replay, first - none_first, replay - none_replay, GOALS.get(name))
        for name, (first, replay) in least.items()
    ]


def as_json(measured: tuple[list[Row], list[Row]]) -> str:
    """Return the rows for machines."""
    in_app, alone = ([asdict(row) for row in rows] for rows in measured)
    return json.dumps({"in an app": in_app, "alone": alone})


def listed(measured: tuple[list[Row], list[Row]]) -> str:
    """Return the rows for people."""
    in_app, alone = measured
    return f"{_listed('in an app', in_app)}\n\n{_listed('alone', alone)}"


def _listed(what: str, rows: list[Row]) -> str:
    lines = [f"{what:<14} {'first':>9} {'added':>8} {'replay':>9} {'added':>8} {'goal':>6}   µs per request"]
    for row in rows:
        goal = "" if row.goal is None else f"{row.goal:.0f}"
        first, replay = f"{row.first:>9.1f} {row.first_added:>8.1f}", f"{row.replay:>9.1f} {row.replay_added:>8.1f}"
        lines.append(f"{row.name:<14} {first} {replay} {goal:>6}")
    return "\n".join(lines)
