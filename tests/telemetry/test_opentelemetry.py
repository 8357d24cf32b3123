"""Metrics and spans for OpenTelemetry, through a real SDK."""

import time
from collections.abc import Callable
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from semel.core.events import (
    ClientRetried,
    Fenced,
    MessageEnded,
    Reaped,
    Relayed,
    Reported,
    StoreSurveyed,
    TookOver,
    WaitBegan,
    WaitEnded,
)
from semel.core.key import Key
from semel.telemetry.metrics import METRICS
from semel.telemetry.opentelemetry import SPANS, OpenTelemetry
from semel.telemetry.stream import tell, use
from tests.telemetry.test_requests import ONE, guarded


class Sdk:
    """An SDK that keeps everything, and a sink that speaks to it."""

    def __init__(self) -> None:
        self.exporter, self.reader = InMemorySpanExporter(), InMemoryMetricReader()
        self.traces = TracerProvider()
        self.traces.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.meters = MeterProvider([self.reader])
        self.sink = OpenTelemetry(tracer_provider=self.traces, meter_provider=self.meters)

    def spans(self) -> dict[str, ReadableSpan]:
        return {span.name: span for span in self.exporter.get_finished_spans()}

    def points(self, name: str) -> dict[tuple[Any, ...], Any]:
        """The values of a metric, by the values of its attributes."""
        data: Any = self.reader.get_metrics_data()
        found = [
            metric
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name == name
        ]
        return {
            tuple(point.attributes.values()): getattr(point, "value", getattr(point, "count", None))
            for metric in found
            for point in metric.data.data_points
        }


@pytest.fixture
def sdk(used: Callable[[Any], Any]) -> Sdk:
    made = Sdk()
    used(made.sink)
    return made


def test_spans_are_children_of_the_servers(sdk: Sdk) -> None:
    """Claim, handler and store are spans below the server's own, in their order; it has the outcome."""
    before = time.time_ns()
    with sdk.traces.get_tracer("server").start_as_current_span("POST"):
        sdk.sink(_request())
    spans = sdk.spans()
    server = spans.pop("POST")
    assert set(spans) == set(SPANS)
    assert {span.parent.span_id for span in spans.values() if span.parent} == {server.context.span_id}
    claim, handler, store = (spans[name] for name in SPANS)
    assert claim.end_time == handler.start_time
    assert handler.end_time == store.start_time
    assert before - 2_000_000_000 < (claim.start_time or 0) < before
    assert server.attributes is not None
    assert dict(server.attributes) == {
        "semel.outcome": "ran",
        "semel.door": "asgi",
        "semel.key": Key("order-17").short(),
        "semel.attempt": 1,
    }


def test_no_spans_without_a_server(sdk: Sdk) -> None:
    """Without a span around them, requests are counted and not traced: each would be a trace of its own."""
    client = guarded()
    for _ in range(2):
        client.post("/orders/3", **ONE)
    assert sdk.spans() == {}
    assert sdk.points("semel.requests") == {
        ("POST /orders/{number}", "asgi", "ran"): 1,
        ("POST /orders/{number}", "asgi", "replayed"): 1,
    }
    parts = ("claim", "handler", "store", "replay")
    assert [sdk.points(f"semel.{name}.duration") for name in parts] == [{(): 2}, {(): 1}, {(): 1}, {(): 1}]


def test_a_request_through_the_app_is_traced(sdk: Sdk) -> None:
    """A guarded request that is served within a server's span has its spans in that trace."""
    app: Any = guarded().app
    tracer = sdk.traces.get_tracer("server")

    async def served(scope: Any, receive: Any, send: Any) -> None:
        with tracer.start_as_current_span("server"):
            await app(scope, receive, send)

    client = type(guarded())(served)
    client.post("/orders/3", **ONE)
    spans = sdk.spans()
    assert set(spans) == {"server", *SPANS}
    assert len({span.context.trace_id for span in spans.values()}) == 1


def test_metrics(sdk: Sdk) -> None:
    """The same is counted as for Prometheus, under names by OpenTelemetry's conventions."""
    events: list[Any] = [
        TookOver("0123456789ab", 2),
        Fenced("0123456789ab", 2),
        Reported(None, "replay", "POST /pay"),
        Reaped(3, 0, 0),
        Relayed("events", 5, 0, 1, 0),
        MessageEnded("billing", "duplicate"),
        ClientRetried("lost"),
        WaitBegan(),
        WaitBegan(),
        WaitEnded(),
        StoreSurveyed(3, 2, None, 4, 0, 9.5, 0.0, outbox_oldest=60.0),
    ]
    for event in events:
        sdk.sink(event)
    assert sdk.points("semel.takeovers") == {(): 1}
    assert sdk.points("semel.fenced") == {(): 1}
    assert sdk.points("semel.reported") == {("replay",): 1}
    assert sdk.points("semel.reaped")["deleted",] == 3
    assert sdk.points("semel.outbox.messages")["events", "published"] == 5
    assert sdk.points("semel.inbox.messages") == {("billing", "duplicate"): 1}
    assert sdk.points("semel.client.retries") == {("lost",): 1}
    assert sdk.points("semel.waiting") == {(): 1}
    assert sdk.points("semel.records") == {("in_flight",): 3, ("stuck",): 2, ("accepted",): 4, ("expired",): 0}
    assert sdk.points("semel.oldest")["outbox",] == 60


def test_names() -> None:
    """No two metrics have the same name, neither in Prometheus nor in OpenTelemetry."""
    for names in ([metric.prometheus for metric in METRICS], [metric.opentelemetry for metric in METRICS]):
        assert len(set(names)) == len(METRICS)


def _request() -> Any:
    from semel.core.events import RequestEnded, Stretch  # noqa: PLC0415 - used in one place

    claim, handler, store = Stretch(0.0, 0.25), Stretch(0.25, 0.5), Stretch(0.75, 0.25)
    return RequestEnded("ran", "POST /pay", "asgi", Key("order-17").short(), 1, 1.0, claim, handler, store)


def test_two_of_the_same_providers(sdk: Sdk) -> None:
    """A second one for the same providers, of an app's factory, is the first: nothing is counted twice."""
    again = use(OpenTelemetry(tracer_provider=sdk.traces, meter_provider=sdk.meters))
    assert again is sdk.sink
    tell(TookOver("key", 2))
    assert sdk.points("semel.takeovers") == {(): 1}
    assert OpenTelemetry(tracer_provider=sdk.traces) is not sdk.sink
