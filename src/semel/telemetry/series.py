"""The numbers behind the metrics for Prometheus: those of this process, or in files that several processes share. Which
event changes which is said in ``prometheus.py``, but for a request, which every request is.

``prometheus_client`` takes a lock for each number and walks along the buckets: that was more than all else that is done
for a request. ``Own`` has one lock for all of them, and looks the bucket up. Nothing is put off: what was counted is in
the next scrape.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar
from prometheus_client.utils import INF, floatToGoString

from semel.core.events import RequestEnded
from semel.core.trace import read_trace
from semel.telemetry import metrics
from semel.telemetry.metrics import COMMON, OF_STORE, Metric
from semel.telemetry.stream import start_afresh_in_children

#: With several processes (PROMETHEUS_MULTIPROC_DIR), those that live are added up; of a store, the last word counts.
_MULTIPROCESS = {metrics.WAITING.name: "livesum"}

#: The last digit of the traceparent of a trace that is recorded: it has the lowest bit.
_SAMPLED = frozenset("13579bdf")

_Row = dict[tuple[str, ...], float]


class _Durations:
    """One histogram. Its owner has the lock."""

    __slots__ = ("counts", "exemplars", "sum")

    def __init__(self, buckets: int) -> None:
        self.counts = [0] * buckets
        self.sum = 0.0
        #: The last of each bucket that was part of a sampled trace, and when.
        self.exemplars: dict[int, tuple[str, float, float]] = {}

    def copy(self) -> tuple[list[int], float, dict[int, tuple[str, float, float]]]:
        return self.counts.copy(), self.sum, self.exemplars.copy()


class Own(Collector):
    """The numbers of this process, in its memory."""

    def __init__(self, registry: CollectorRegistry, buckets: tuple[float, ...]) -> None:
        """Have *registry* show them. Those of a store are not there until they are set."""
        self._bounds = bounds = tuple(float(each) for each in buckets if each != INF)
        if not bounds or list(bounds) != sorted(set(bounds)):
            raise ValueError(f"buckets must be numbers of seconds in rising order, not {buckets!r}.")
        self._limits = [*map(floatToGoString, bounds), "+Inf"]
        self.start_afresh()
        self._rows: dict[str, _Row] = {each.name: {} for each in COMMON if each.kind != "histogram"}
        for metric in COMMON:
            if metric.kind != "histogram" and len(metric.labels) <= 1:
                self._begin(metric)
        self._durations = {each.name: _Durations(len(self._limits)) for each in COMMON if each.kind == "histogram"}
        observed = (metrics.CLAIM, metrics.HANDLER, metrics.STORE, metrics.REPLAY)
        self._claim, self._handler, self._store, self._replay = (self._durations[each.name] for each in observed)
        #: By endpoint and door, so that one look-up finds all outcomes.
        self._requests: dict[tuple[str, str], dict[str, int]] = {}
        start_afresh_in_children(self)
        registry.register(self)

    def start_afresh(self) -> None:
        """Have a lock. A fork may happen while another thread has it, and that thread is not in the child."""
        self._lock = threading.Lock()

    def request(self, event: RequestEnded) -> None:
        """Count a request, and measure its parts."""
        place = event.endpoint, event.door
        counts = self._requests.get(place) or self._new(place)
        outcome, bounds, claim, handler, store = event.outcome, self._bounds, event.claim, event.handler, event.store
        # A call for each histogram would take as long as all of this.
        with self._lock:
            counts[outcome] += 1
            if claim is not None:
                durations = self._claim
                durations.counts[bisect_left(bounds, claim.seconds)] += 1
                durations.sum += claim.seconds
            if handler is not None:
                durations = self._handler
                durations.counts[bisect_left(bounds, handler.seconds)] += 1
                durations.sum += handler.seconds
            elif outcome == "replayed":
                durations = self._replay
                durations.counts[bisect_left(bounds, event.seconds)] += 1
                durations.sum += event.seconds
            if store is not None:
                durations = self._store
                durations.counts[bisect_left(bounds, store.seconds)] += 1
                durations.sum += store.seconds
        if event.trace is not None and event.trace[-1:] in _SAMPLED:
            self._exemplify(event, event.trace)

    def _exemplify(self, event: RequestEnded, trace: str) -> None:
        """Keep the trace of this request as the example of the buckets that it is in."""
        replay = event.seconds if event.handler is None and event.outcome == "replayed" else None
        parts = (self._claim, event.claim), (self._handler, event.handler), (self._store, event.store)
        seen = [(durations, part.seconds) for durations, part in parts if part is not None]
        now = time.time()
        with self._lock:
            for durations, seconds in seen if replay is None else [*seen, (self._replay, replay)]:
                durations.exemplars[bisect_left(self._bounds, seconds)] = trace, seconds, now

    def add(self, metric: Metric, number: int, *labels: str) -> None:
        """Add to a counter, or to a gauge that goes up and down. From then on it has all values of its last label."""
        with self._lock:
            row = self._rows[metric.name]
            if labels not in row:
                self._begin(metric, *labels[:-1])
            row[labels] += number

    def set(self, metric: Metric, number: float, *labels: str) -> None:
        """Set a gauge."""
        with self._lock:
            self._rows.setdefault(metric.name, {})[labels] = number

    def _begin(self, metric: Metric, *labels: str) -> None:
        """Let the series of every value of the last label begin at 0."""
        row = self._rows[metric.name]
        for each in metric.closed or ((),):
            row.setdefault((*labels, each) if isinstance(each, str) else each, 0)

    def _new(self, place: tuple[str, str]) -> dict[str, int]:
        with self._lock:
            # Two threads may come here together, and have to count into the same.
            return self._requests.setdefault(place, dict.fromkeys(metrics.REQUESTS.closed, 0))

    def describe(self) -> Iterable[Family]:
        """Name what there may be, so that no two collectors of a registry have the same."""
        return [_family(metric) for metric in (*COMMON, *OF_STORE)]

    def collect(self) -> Iterator[Family]:
        """Return all that is counted, as it was at one moment."""
        with self._lock:
            rows = {name: row.copy() for name, row in self._rows.items()}
            requests = {place: counts.copy() for place, counts in self._requests.items()}
            durations = {name: each.copy() for name, each in self._durations.items()}
        rows[metrics.REQUESTS.name] = {
            (*place, outcome): number for place, counts in requests.items() for outcome, number in counts.items()
        }
        for metric in (*COMMON, *OF_STORE):
            family: Any = _family(metric)
            if metric.name in durations:
                counts, total, exemplars = durations[metric.name]
                shown = [_exemplar(exemplars.get(place)) for place in range(len(counts))]
                family.add_metric((), list(zip(self._limits, accumulate(counts), shown, strict=True)), total)
            elif metric.name in rows:
                for labels, number in rows[metric.name].items():
                    family.add_metric(labels, number)
            else:
                continue
            yield family


class Shared:
    """The numbers of several processes, in the files of ``prometheus_client``. Each is written at once: one that is
    killed has lost none.
    """

    def __init__(self, registry: CollectorRegistry, buckets: tuple[float, ...]) -> None:
        """Make them, where ``prometheus_client`` was told to."""
        self._registry = registry
        self._buckets = buckets
        self._made: dict[str, Any] = {metric.name: self._make(metric) for metric in COMMON}
        for metric in COMMON:
            if len(metric.labels) == 1:
                self._begin(metric)
        observed = (metrics.CLAIM, metrics.HANDLER, metrics.STORE, metrics.REPLAY)
        self._claim, self._handler, self._store, self._replay = (self._made[each.name].observe for each in observed)
        self._requests: dict[tuple[str, str], dict[str, Callable[[], None]]] = {}

    def request(self, event: RequestEnded) -> None:
        """Count a request, and measure its parts. There are no exemplars in those files."""
        place = event.endpoint, event.door
        counters = self._requests.get(place)
        if counters is None:
            counters = self._requests[place] = self._begin(metrics.REQUESTS, *place)
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

    def add(self, metric: Metric, number: int, *labels: str) -> None:
        """Add to a counter, or to a gauge that goes up and down."""
        if len(labels) > 1:
            self._begin(metric, *labels[:-1])
        self._child(metric, labels).inc(number)

    def set(self, metric: Metric, number: float, *labels: str) -> None:
        """Set a gauge."""
        if metric.name not in self._made:
            self._made[metric.name] = self._make(metric)
        self._child(metric, labels).set(number)

    def _make(self, metric: Metric) -> Any:
        common: dict[str, Any] = {"labelnames": metric.labels, "registry": self._registry}
        if metric.kind == "counter":
            return Counter(metric.name, metric.help, **common)
        if metric.kind == "histogram":
            return Histogram(metric.name, metric.help, buckets=self._buckets, **common)
        mode: Any = _MULTIPROCESS.get(metric.name, "mostrecent")
        return Gauge(metric.name, metric.help, multiprocess_mode=mode, **common)

    def _child(self, metric: Metric, labels: tuple[str, ...]) -> Any:
        made = self._made[metric.name]
        return made.labels(*labels) if labels else made

    def _begin(self, metric: Metric, *labels: str) -> dict[str, Callable[[], None]]:
        """Make the series of every value of the last label, so that each begins at 0."""
        return {each: self._made[metric.name].labels(*labels, each).inc for each in metric.closed}


def _family(metric: Metric) -> Family:
    if metric.kind == "counter":
        return CounterMetricFamily(metric.name, metric.help, labels=metric.labels)
    if metric.kind == "histogram":
        return HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
    return GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)


def _exemplar(seen: tuple[str, float, float] | None) -> Exemplar | None:
    read = None if seen is None else read_trace(seen[0])
    if seen is None or read is None:
        return None
    return Exemplar({"trace_id": read.trace_id, "span_id": read.span_id}, seen[1], seen[2])
