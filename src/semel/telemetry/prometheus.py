"""Metrics for Prometheus, as a sink. It serves no HTTP: ``prometheus_client`` does, or the application's ``/metrics``.

    semel.telemetry.use(Prometheus())

Series without labels, and those with a closed list of values, exist from the start, so that 0 differs from absent;
those of an endpoint, a consumer or a destination from its first event on.

Where a trace is known and sampled, the histograms have exemplars with its ids, in the OpenMetrics format alone. The
sink for OpenTelemetry knows it; without that one, ``Prometheus(traceparent=current_traceparent)`` does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Self

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
from semel.errors import ConfigurationError
from semel.telemetry import metrics
from semel.telemetry.metrics import BUCKETS, Metric

try:
    from prometheus_client import REGISTRY, CollectorRegistry, values

    from semel.telemetry.series import Own, Shared
except ImportError as error:  # pragma: no cover - seen only where the extra is missing
    raise ImportError(
        "semel.telemetry.prometheus needs prometheus-client. Run: pip install 'semel[prometheus]'"
    ) from error


#: The attribute of a registry with its sink.
_SINK = "_semel_sink"


class Prometheus:
    """Counts and measures for a registry of ``prometheus_client``. There is one for each registry: where an app is made
    by a factory, the second call returns the first one's sink.
    """

    #: No label has a key.
    wants_keys = False
    #: As of any sink: what the current trace is known by.
    traceparent: Callable[[], str | None] | None
    _buckets: tuple[float, ...]

    def __new__(cls, registry: CollectorRegistry = REGISTRY, **_: Any) -> Self:
        """Return the sink of *registry*, if there is one."""
        made = getattr(registry, _SINK, None)
        return made if isinstance(made, cls) else super().__new__(cls)

    def __init__(
        self,
        registry: CollectorRegistry = REGISTRY,
        *,
        buckets: tuple[float, ...] = BUCKETS,
        traceparent: Callable[[], str | None] | None = None,
    ) -> None:
        """Have *registry* show the metrics; *buckets* are those of the histograms, in seconds.

        *traceparent* returns the current trace, as W3C writes it, where no other sink does.
        """
        if getattr(registry, _SINK, None) is self:
            if (buckets, traceparent) != (self._buckets, self.traceparent):
                raise ConfigurationError("This registry has a Prometheus() with other buckets, or another traceparent.")
            return
        #: Where the metrics are.
        self.registry = registry
        self._buckets = buckets
        self.traceparent = traceparent
        # With PROMETHEUS_MULTIPROC_DIR its values are in files, which another process reads, and may outlive this one.
        is_shared = values.ValueClass is not values.MutexValue
        self._numbers: Own | Shared = (Shared if is_shared else Own)(registry, buckets)
        self._told: dict[type[Any], Callable[[Any], None]] = {
            RequestEnded: self._numbers.request,
            Reported: lambda event: self._add(metrics.REPORTED, 1, event.outcome),
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
            WaitEnded: lambda _: self._add(metrics.WAITING, -1),
            Relayed: self._relayed,
            MessageEnded: lambda event: self._add(metrics.INBOX, 1, event.consumer, event.outcome),
            ClientRetried: lambda event: self._add(metrics.CLIENT_RETRIES, 1, event.reason),
            StoreSurveyed: self._survey,
        }
        setattr(registry, _SINK, self)

    def __call__(self, event: Event) -> None:
        """Count *event*, if it is among those that are."""
        told = self._told.get(type(event))
        if told is not None:
            told(event)

    def _add(self, metric: Metric, number: int, *labels: str) -> None:
        self._numbers.add(metric, number, *labels)

    def _one(self, metric: Metric, *labels: str) -> Callable[[Any], None]:
        return lambda _: self._numbers.add(metric, 1, *labels)

    def _reaped(self, event: Reaped) -> None:
        for how in metrics.REAPED.closed:
            self._add(metrics.REAPED, getattr(event, how), how)

    def _relayed(self, event: Relayed) -> None:
        for outcome in metrics.OUTBOX.closed:
            self._add(metrics.OUTBOX, getattr(event, outcome), event.to, outcome)

    def _survey(self, event: StoreSurveyed) -> None:
        """Set the gauges of a store. They are not there before: where no survey is made, they must not stand at 0."""
        for metric, value, *labels in metrics.surveyed(event, time.time()):
            if value is not None:
                self._numbers.set(metric, value, *labels)
