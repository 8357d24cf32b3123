"""Metrics and spans for OpenTelemetry, as a sink. It needs the API alone: where they go, the application's SDK says.

    semel.telemetry.use(OpenTelemetry())

A guarded request has spans ``semel.claim``, ``semel.handler`` and ``semel.store`` below the span that is current when
it ends: the server's, where one is recorded. Without one there are no spans. The server's span of a replay, of a
duplicate and of a take-over has a link to the trace of the attempt that it came upon, which is stored with the record.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self
from weakref import WeakValueDictionary

from semel.core.events import (
    ClientRetried,
    Event,
    Fenced,
    FinishedAbandoned,
    FinishedAccepted,
    GaveUpAbandoned,
    LostLease,
    MessageEnded,
    NotStored,
    ParkedUnknown,
    Reaped,
    Relayed,
    Reported,
    RequestEnded,
    StoreFailed,
    StoreSurveyed,
    Stretch,
    Swept,
    SweptUnknown,
    TookOver,
    WaitBegan,
    WaitEnded,
)
from semel.core.trace import read_trace
from semel.telemetry import metrics
from semel.telemetry.metrics import BUCKETS, METRICS, Metric
from semel.telemetry.stream import start_afresh_in_children

try:
    from opentelemetry.metrics import MeterProvider, Observation, get_meter
    from opentelemetry.trace import (
        Span,
        SpanContext,
        TraceFlags,
        TracerProvider,
        get_current_span,
        get_tracer,
    )
except ImportError as error:  # pragma: no cover - seen only where the extra is missing
    raise ImportError(
        "semel.telemetry.opentelemetry needs the OpenTelemetry API. Run: pip install 'semel[opentelemetry]'"
    ) from error

#: Spans, by the part of a request that they are about.
SPANS: dict[str, str] = {
    "semel.claim": "Claiming the key, or finding that it is taken.",
    "semel.handler": "The application's handler. What it traces itself is beside this span, and not below it.",
    "semel.store": "Storing the answer; in atomic mode, COMMIT.",
}
#: Attributes of those spans, and of the one above them.
ATTRIBUTES: dict[str, str] = {
    "semel.outcome": "How the request ended, as in `semel_requests_total`.",
    "semel.door": "The entry point.",
    "semel.key": "The digest of the key, which `semel keys show` accepts. There is none without a key.",
    "semel.attempt": "Which attempt ran the handler. There is none where it did not run.",
    "semel.link": "Of a link: `attempt`. It leads to the span in which the operation was run, or is.",
}
_LINK = {"semel.link": "attempt"}

#: By the ids of the providers.
_sinks: WeakValueDictionary[tuple[type, int, int], Any] = WeakValueDictionary()

_NANOSECONDS = 1_000_000_000
#: The names of labels in OpenTelemetry, where there is a convention.
_LABELS = {"endpoint": "http.route"}


class OpenTelemetry:
    """Counts, measures and traces through the OpenTelemetry API. There is one for each pair of providers: where an app
    is made by a factory, the second call returns the first one's sink.
    """

    def __new__(
        cls, *, tracer_provider: TracerProvider | None = None, meter_provider: MeterProvider | None = None
    ) -> Self:
        """Return the sink of these providers, if there is one."""
        place = cls, id(tracer_provider), id(meter_provider)
        made: Self = _sinks.setdefault(place, super().__new__(cls))
        return made

    def __init__(
        self, *, tracer_provider: TracerProvider | None = None, meter_provider: MeterProvider | None = None
    ) -> None:
        """Use the providers that are given, or else the global ones."""
        if hasattr(self, "_told"):
            return
        #: Kept, so that no others have their ids.
        self._providers = tracer_provider, meter_provider
        self._tracer = get_tracer("semel", tracer_provider=tracer_provider)
        meter = get_meter("semel", meter_provider=meter_provider)
        self._made: dict[str, Any] = {
            metric.name: _made(meter, metric) for metric in METRICS if metric is not metrics.REQUESTS
        }
        # Every request is counted by this one, and the SDK takes ten microseconds to add 1: so it is kept here, and
        # asked for when metrics are exported.
        name, unit, told = metrics.REQUESTS.opentelemetry, metrics.REQUESTS.unit, metrics.REQUESTS.help
        meter.create_observable_counter(name, [self._requests], unit, told)
        self._counts: dict[tuple[str, ...], int] = {}
        self.start_afresh()
        start_afresh_in_children(self)
        self._claim, self._handler, self._store, self._replay = (
            self._made[each.name].record for each in (metrics.CLAIM, metrics.HANDLER, metrics.STORE, metrics.REPLAY)
        )
        #: By the values of the labels, so that none is made for each request.
        self._attributes: dict[tuple[str, ...], Mapping[str, str]] = {}
        self._told: dict[type[Any], Callable[[Any], None]] = {
            RequestEnded: self._request,
            Reported: lambda event: self._add(metrics.REPORTED, 1, event.outcome),
            TookOver: lambda _: self._add(metrics.TAKEOVERS),
            Fenced: lambda _: self._add(metrics.FENCED),
            LostLease: lambda _: self._add(metrics.LEASE_LOST),
            ParkedUnknown: lambda _: self._add(metrics.UNKNOWN),
            SweptUnknown: lambda _: self._add(metrics.UNKNOWN),
            GaveUpAbandoned: lambda _: self._add(metrics.UNKNOWN),
            NotStored: lambda _: self._add(metrics.NOT_STORED),
            StoreFailed: lambda _: self._add(metrics.STORE_FAILED),
            Swept: lambda _: self._add(metrics.SWEPT),
            FinishedAccepted: lambda _: self._add(metrics.COMPLETED, 1, "accepted"),
            FinishedAbandoned: lambda _: self._add(metrics.COMPLETED, 1, "abandoned"),
            Reaped: self._reaped,
            WaitBegan: lambda _: self._add(metrics.WAITING, 1),
            WaitEnded: lambda _: self._add(metrics.WAITING, -1),
            Relayed: self._relayed,
            MessageEnded: lambda event: self._add(metrics.INBOX, 1, event.consumer, event.outcome),
            ClientRetried: lambda event: self._add(metrics.CLIENT_RETRIES, 1, event.reason),
            StoreSurveyed: self._survey,
        }

    def start_afresh(self) -> None:
        """Have a lock."""
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        """Count *event*, if it is among those that are."""
        told = self._told.get(type(event))
        if told is not None:
            told(event)

    def traceparent(self) -> str | None:
        """Return the current trace, which is stored with the record of an operation."""
        return current_traceparent()

    def _add(self, metric: Metric, number: int = 1, *labels: str) -> None:
        self._made[metric.name].add(number, self._named(metric, labels))

    def _named(self, metric: Metric, labels: tuple[str, ...]) -> Mapping[str, str]:
        place = (metric.name, *labels)
        found = self._attributes.get(place)
        if found is None:
            names = (_LABELS.get(name, f"semel.{name}") for name in metric.labels)
            found = self._attributes[place] = dict(zip(names, labels, strict=True))
        return found

    def _request(self, event: RequestEnded) -> None:
        place = event.endpoint, event.door, event.outcome
        with self._lock:
            self._counts[place] = self._counts.get(place, 0) + 1
        if event.claim is not None:
            self._claim(event.claim.seconds)
        if event.handler is not None:
            self._handler(event.handler.seconds)
        elif event.outcome == "replayed":
            self._replay(event.seconds)
        if event.store is not None:
            self._store(event.store.seconds)
        self._trace(event)

    def _requests(self, _options: object) -> Iterator[Observation]:
        """Return how many requests there were, by endpoint, door and outcome."""
        with self._lock:
            counts = self._counts.copy()
        for place, number in counts.items():
            yield Observation(number, self._named(metrics.REQUESTS, place))

    def _trace(self, event: RequestEnded) -> None:
        """Make the spans of a request that has ended, below the current one: no clock was read but the guard's."""
        around = get_current_span()
        if not around.is_recording():
            return
        began = time.time_ns() - int(event.seconds * _NANOSECONDS)
        told: dict[str, Any] = {"semel.outcome": event.outcome, "semel.door": event.door}
        if event.key is not None:
            told["semel.key"] = event.key
        if event.attempt is not None:
            told["semel.attempt"] = event.attempt
        around.set_attributes(told)
        if event.found is not None:
            _link(around, event.found)
        self._span("semel.claim", event.claim, began)
        self._span("semel.handler", event.handler, began)
        self._span("semel.store", event.store, began)

    def _span(self, name: str, part: Stretch | None, began: int) -> None:
        if part is not None:
            start = began + int(part.after * _NANOSECONDS)
            self._tracer.start_span(name, start_time=start).end(start + int(part.seconds * _NANOSECONDS))

    def _reaped(self, event: Reaped) -> None:
        for how in metrics.REAPED.closed:
            self._add(metrics.REAPED, getattr(event, how), how)

    def _relayed(self, event: Relayed) -> None:
        for outcome in metrics.OUTBOX.closed:
            self._add(metrics.OUTBOX, getattr(event, outcome), event.to, outcome)

    def _survey(self, event: StoreSurveyed) -> None:
        for metric, value, *labels in metrics.surveyed(event, time.time()):
            if value is not None:
                self._made[metric.name].set(value, self._named(metric, tuple(labels)))


def current_traceparent() -> str | None:
    """Return the current span's trace as W3C writes it; None where there is none."""
    context = get_current_span().get_span_context()
    if not context.is_valid:
        return None
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"


def _link(span: Span, traceparent: str) -> None:
    """Link *span* to the trace that is stored with a record. What can't be read is no link."""
    found = read_trace(traceparent)
    if found is not None:
        flags = TraceFlags(found.flags)
        context = SpanContext(int(found.trace_id, 16), int(found.span_id, 16), is_remote=True, trace_flags=flags)
        span.add_link(context, _LINK)


def _made(meter: Any, metric: Metric) -> Any:
    name = metric.opentelemetry
    if metric.kind == "counter":
        return meter.create_counter(name, metric.unit, metric.help)
    if metric.kind == "histogram":
        return meter.create_histogram(name, metric.unit, metric.help, explicit_bucket_boundaries_advisory=list(BUCKETS))
    if metric is metrics.WAITING:
        return meter.create_up_down_counter(name, metric.unit, metric.help)
    return meter.create_gauge(name, metric.unit, metric.help)
