"""Metrics for Prometheus, as a sink. It serves no HTTP: ``prometheus_client`` does, or the application's ``/metrics``.

    semel.telemetry.use(Prometheus())

Series without labels, and those with a closed list of values, exist from the start, so that 0 differs from absent;
those of an endpoint, a consumer or a destination from its first event on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

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
    Swept,
    SweptUnknown,
    TookOver,
    WaitBegan,
    WaitEnded,
)
from semel.telemetry import metrics
from semel.telemetry.metrics import BUCKETS, COMMON, OF_STORE, Metric

try:
    from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
except ImportError as error:  # pragma: no cover - seen only where the extra is missing
    raise ImportError(
        "semel.telemetry.prometheus needs prometheus-client. Run: pip install 'semel[prometheus]'"
    ) from error

#: With several processes (PROMETHEUS_MULTIPROC_DIR), those that live are added up; of a store, the last word counts.
_MULTIPROCESS = {metrics.WAITING.name: "livesum"}


class Prometheus:
    """Counts and measures into a registry of ``prometheus_client``."""

    #: No label has a key.
    wants_keys = False

    def __init__(self, registry: CollectorRegistry = REGISTRY, *, buckets: tuple[float, ...] = BUCKETS) -> None:
        """Make the metrics in *registry*; *buckets* are those of the histograms, in seconds."""
        #: Where the metrics are.
        self.registry = registry
        self._buckets = buckets
        self._made: dict[str, Any] = {metric.name: self._make(metric) for metric in COMMON}
        for metric in COMMON:
            if len(metric.labels) == 1:
                for value in metric.closed:
                    self._made[metric.name].labels(value)
        #: By endpoint and door: what counts each outcome.
        self._requests: dict[tuple[str, str], dict[str, Callable[[], None]]] = {}
        self._told: dict[type[Any], Callable[[Any], None]] = {
            RequestEnded: self._request,
            Reported: lambda event: self._of(metrics.REPORTED).labels(event.outcome).inc(),
            TookOver: self._one(metrics.TAKEOVERS),
            Fenced: self._one(metrics.FENCED),
            LostLease: self._one(metrics.LEASE_LOST),
            ParkedUnknown: self._one(metrics.UNKNOWN),
            SweptUnknown: self._one(metrics.UNKNOWN),
            GaveUpAbandoned: self._one(metrics.UNKNOWN),
            NotStored: self._one(metrics.NOT_STORED),
            StoreFailed: self._one(metrics.STORE_FAILED),
            Swept: self._one(metrics.SWEPT),
            FinishedAccepted: self._one(metrics.COMPLETED, "accepted"),
            FinishedAbandoned: self._one(metrics.COMPLETED, "abandoned"),
            Reaped: self._reaped,
            WaitBegan: self._one(metrics.WAITING),
            WaitEnded: lambda _: self._of(metrics.WAITING).dec(),
            Relayed: self._relayed,
            MessageEnded: self._message,
            ClientRetried: lambda event: self._of(metrics.CLIENT_RETRIES).labels(event.reason).inc(),
            StoreSurveyed: self._survey,
        }
        observed = (metrics.CLAIM, metrics.HANDLER, metrics.STORE, metrics.REPLAY)
        self._claim, self._handler, self._store, self._replay = (self._of(each).observe for each in observed)

    def __call__(self, event: Event) -> None:
        """Count *event*, if it is among those that are."""
        told = self._told.get(type(event))
        if told is not None:
            told(event)

    def _make(self, metric: Metric) -> Any:
        common: dict[str, Any] = {"labelnames": metric.labels, "registry": self.registry}
        if metric.kind == "counter":
            return Counter(metric.name, metric.help, **common)
        if metric.kind == "histogram":
            return Histogram(metric.name, metric.help, buckets=self._buckets, **common)
        mode: Any = _MULTIPROCESS.get(metric.name, "mostrecent")
        return Gauge(metric.name, metric.help, multiprocess_mode=mode, **common)

    def _of(self, metric: Metric) -> Any:
        return self._made[metric.name]

    def _one(self, metric: Metric, *labels: str) -> Callable[[Any], None]:
        made = self._of(metric)
        child = made.labels(*labels) if labels else made
        return lambda _: child.inc()

    def _request(self, event: RequestEnded) -> None:
        place = event.endpoint, event.door
        counters = self._requests.get(place)
        if counters is None:
            counters = self._requests[place] = self._all(metrics.REQUESTS, *place)
        outcome = event.outcome
        counters[outcome]()
        if event.claim is not None:
            self._claim(event.claim.seconds)
        if event.handler is not None:
            self._handler(event.handler.seconds)
        elif outcome == "replayed":
            self._replay(event.seconds)
        if event.store is not None:
            self._store(event.store.seconds)

    def _all(self, metric: Metric, *labels: str) -> dict[str, Callable[[], None]]:
        """Make the series of every value of the last label, so that each begins at 0."""
        return {value: self._of(metric).labels(*labels, value).inc for value in metric.closed}

    def _reaped(self, event: Reaped) -> None:
        for how, number in (("deleted", event.deleted), ("stripped", event.stripped), ("abandoned", event.abandoned)):
            self._of(metrics.REAPED).labels(how).inc(number)

    def _relayed(self, event: Relayed) -> None:
        for outcome in metrics.OUTBOX.closed:
            self._of(metrics.OUTBOX).labels(event.to, outcome).inc(getattr(event, outcome))

    def _message(self, event: MessageEnded) -> None:
        self._all(metrics.INBOX, event.consumer)[event.outcome]()

    def _survey(self, event: StoreSurveyed) -> None:
        """Set the gauges of a store. They are made here: where no survey is made, they must not stand at 0."""
        for metric in OF_STORE:
            if metric.name not in self._made:
                self._made[metric.name] = self._make(metric)
        for metric, value, *labels in metrics.surveyed(event, time.time()):
            if value is not None:
                made = self._of(metric)
                (made.labels(*labels) if labels else made).set(value)
