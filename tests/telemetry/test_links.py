"""The trace of the attempt that ran the handler is stored with its record, and what comes upon it links to it."""

import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from fastapi import FastAPI
from opentelemetry.sdk.trace import ReadableSpan
from starlette.testclient import TestClient

from semel import SINGLE_TENANT, Policy
from semel.asgi import IdempotencyMiddleware
from semel.core.commands import Browse, Claim
from semel.core.record import Hold
from semel.core.trace import Trace, read_trace
from semel.stores.memory import AsyncMemoryStore, MemoryStore
from semel.telemetry.stream import current_trace
from semel.testing.clock import Clock
from tests.telemetry.conftest import Seen
from tests.telemetry.test_opentelemetry import Sdk
from tests.telemetry.test_requests import ONE, fastapi_app

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def sdk(used: Callable[[Any], Any]) -> Sdk:
    made = Sdk()
    used(made.sink)
    return made


@pytest.fixture(params=["memory", "sqlite"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Where records outlive an app."""
    return MemoryStore() if request.param == "memory" else f"sqlite:///{tmp_path / 'semel.db'}"


def served(sdk: Sdk, store: Any, policy: Policy | None = None, app: Any = None) -> TestClient:
    """An app behind a server that traces its requests."""
    if isinstance(store, MemoryStore):
        store = AsyncMemoryStore(memory=store)
    guarded = IdempotencyMiddleware(app or fastapi_app(), store=store, scope=SINGLE_TENANT, policy=policy)
    tracer = sdk.traces.get_tracer("server")

    async def traced(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await guarded(scope, receive, send)
            return
        with tracer.start_as_current_span("server"):
            await guarded(scope, receive, send)

    return TestClient(traced)


def servers(sdk: Sdk) -> list[ReadableSpan]:
    """The spans of the server, in the order in which they ended."""
    return [span for span in sdk.exporter.get_finished_spans() if span.name == "server"]


def linked(span: ReadableSpan) -> list[tuple[int, int]]:
    return [(link.context.trace_id, link.context.span_id) for link in span.links]


def place_of(span: ReadableSpan) -> tuple[int, int]:
    assert span.context is not None
    return span.context.trace_id, span.context.span_id


def test_a_replay_links_to_the_first_execution(sdk: Sdk, place: Any) -> None:
    """A replay's span links to the span of the request that ran the handler; that one links to nothing."""
    with served(sdk, place) as client:
        for _ in range(2):
            client.post("/orders/3", **ONE)
    first, replay = servers(sdk)
    assert linked(first) == []
    assert linked(replay) == [place_of(first)]
    (link,) = replay.links
    assert (link.context.is_remote, link.context.trace_flags.sampled) == (True, True)
    assert dict(link.attributes or {}) == {"semel.link": "attempt"}


def test_after_a_restart(sdk: Sdk, tmp_path: Path) -> None:
    """The link is stored: it is there when another process answers."""
    for _ in range(2):
        with served(sdk, f"sqlite:///{tmp_path / 'semel.db'}") as client:
            client.post("/orders/3", **ONE)
    first, replay = servers(sdk)
    assert linked(replay) == [place_of(first)]


def test_atomic_mode(sdk: Sdk, tmp_path: Path) -> None:
    """In atomic mode the trace is in the record that commits with the handler's writes."""
    with served(sdk, f"sqlite:///{tmp_path / 'semel.db'}", Policy.ietf(mode="atomic")) as client:
        for _ in range(2):
            client.post("/orders/3", **ONE)
    first, replay = servers(sdk)
    assert linked(replay) == [place_of(first)]


def test_a_waiter_links_to_the_one_it_waited_for(sdk: Sdk, place: Any) -> None:
    """A duplicate that waits for the first and gets its answer links to it."""
    app, begun, go_on = FastAPI(), threading.Event(), threading.Event()

    @app.post("/slow")
    def slow() -> str:
        begun.set()
        assert go_on.wait(60)
        return "done"

    policy = Policy.ietf(in_progress="wait", wait=timedelta(minutes=1))
    with served(sdk, place, policy, app) as client:
        requests = [threading.Thread(target=client.post, args=("/slow",), kwargs=ONE) for _ in range(2)]
        requests[0].start()
        assert begun.wait(60)
        requests[1].start()
        go_on.set()
        for each in requests:
            each.join()
    by_outcome = {(span.attributes or {})["semel.outcome"]: span for span in servers(sdk)}
    first = by_outcome.pop("ran")
    (waiter,) = by_outcome.values()
    assert linked(waiter) == [place_of(first)]


def test_a_take_over_links_to_the_dead(sdk: Sdk, seen: Seen) -> None:
    """What takes an operation over links to the attempt that died, and its own trace is stored from then on."""
    memory = MemoryStore()
    with served(sdk, memory) as client:
        client.post("/orders/3", **ONE)
    (record,) = memory.perform(Browse(1))
    # The same record, as its worker leaves it by dying.
    memory = MemoryStore()
    lost = Claim(record.scope, record.key, uuid4().bytes, record.fingerprint, timedelta(0), timedelta(hours=1))
    assert isinstance(memory.perform(replace(lost, traceparent=TRACE)), Hold)
    with served(sdk, memory) as client:
        for _ in range(2):
            client.post("/orders/3", **ONE)
    _, heir, replay = servers(sdk)
    assert linked(heir) == [(int(TRACE[3:35], 16), int(TRACE[36:52], 16))]
    assert linked(replay) == [place_of(heir)]
    assert seen.outcomes == ["ran", "ran", "replayed"]


@pytest.mark.parametrize(
    "stored", [None, "", "zero", "00-" + "0" * 32 + "-b7ad6b7169203331-01", "\x00\ud800", TRACE + "x"]
)
def test_what_is_no_trace_is_no_link(sdk: Sdk, stored: str | None) -> None:
    """A record without a trace, or with something else in its place, is replayed without a link."""
    memory = MemoryStore()
    with served(sdk, memory) as client:
        client.post("/orders/3", **ONE)
        place, row = next(iter(memory._rows.items()))
        memory._rows[place] = replace(row, traceparent=stored)
        assert client.post("/orders/3", **ONE).status_code == 200
    replay = servers(sdk)[1]
    assert (replay.attributes or {})["semel.outcome"] == "replayed"
    assert linked(replay) == []


def test_nothing_is_stored_without_a_trace(sdk: Sdk, seen: Seen) -> None:
    """Outside of a span there is no trace, and none is stored."""
    memory = MemoryStore()
    guarded = IdempotencyMiddleware(fastapi_app(), store=AsyncMemoryStore(memory=memory), scope=SINGLE_TENANT)
    TestClient(guarded).post("/orders/3", **ONE)
    (record,) = memory.perform(Browse(1))
    assert (record.traceparent, sdk.sink.traceparent()) == (None, None)
    assert [each.trace for each in seen.requests] == [None]


class Strange:
    """A sink with a trace of its own making."""

    def __init__(self, given: object) -> None:
        self.given = given

    def __call__(self, event: object) -> None:
        """Take no note."""

    def traceparent(self) -> Any:
        if isinstance(self.given, Exception):
            raise self.given
        return self.given


@pytest.mark.parametrize("given", [5, b"", "zero", "\ud800", "0" * 10_000, object(), ValueError("broken")])
def test_a_sinks_strange_trace(given: object, used: Callable[[Any], Any], seen: Seen) -> None:
    """Whatever a sink gives in place of a trace, nothing of it is stored, and the request is served."""
    used(Strange(given))
    memory = MemoryStore()
    with served(Sdk(), memory) as client:
        assert client.post("/orders/3", **ONE).status_code == 200
    (record,) = memory.perform(Browse(1))
    assert record.traceparent is None
    assert [each.trace for each in seen.requests] == [None]


def test_any_sink_may_give_the_trace(used: Callable[[Any], Any], seen: Seen) -> None:
    """The first sink that knows a trace is believed; events have it, and that of the attempt that was found."""
    used(Strange(None))
    used(Strange(TRACE))
    assert current_trace() == TRACE
    with served(Sdk(), MemoryStore()) as client:
        for _ in range(2):
            client.post("/orders/3", **ONE)
    assert [(each.trace, each.found) for each in seen.requests] == [(TRACE, None), (TRACE, TRACE)]


def test_an_expired_operation_is_another(sdk: Sdk) -> None:
    """A key that is used again past its retention is a new operation, which links to nothing."""
    memory = MemoryStore()
    policy = Policy.ietf(retention=timedelta(hours=1))
    with served(sdk, memory, policy) as client:
        client.post("/orders/3", **ONE)
        Clock(memory).advance(timedelta(hours=2))
        client.post("/orders/3", **ONE)
    assert [linked(span) for span in servers(sdk)] == [[], []]


@pytest.mark.parametrize(
    "text, read",
    [
        (TRACE, Trace("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331", 1)),
        (TRACE[:-2] + "00", Trace("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331", 0)),
        ("ff" + TRACE[2:], None),
        (TRACE.upper(), None),
        (TRACE + "\n", None),
        (None, None),
        (5, None),
    ],
)
def test_reading(text: object, read: Trace | None) -> None:
    """A traceparent is read as W3C writes it, and nothing else is."""
    assert read_trace(text) == read
    assert read is None or read.is_sampled == (read.flags == 1)
