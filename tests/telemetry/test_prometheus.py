"""Metrics for Prometheus."""

import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as _openmetrics

from semel.core.events import (
    ClientRetried,
    Event,
    Fenced,
    FinishedAbandoned,
    FinishedAccepted,
    GaveUpAbandoned,
    LostLease,
    MessageEnded,
    NotKept,
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
from semel.core.outcome import ENDED
from semel.errors import ConfigurationError
from semel.telemetry.metrics import BUCKETS, COMMON, OF_STORE
from semel.telemetry.prometheus import Prometheus
from semel.telemetry.stream import current_trace, drop, tell, use

KEY = "0123456789ab"
PART = Stretch(0.0, 0.02)


def openmetrics(registry: CollectorRegistry) -> bytes:
    shown: bytes = _openmetrics(registry)  # type: ignore[no-untyped-call]
    return shown


def asked(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(name, labels)


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def sink(registry: CollectorRegistry) -> Callable[[Event], None]:
    return Prometheus(registry)


def ended(outcome: Any, **parts: Any) -> RequestEnded:
    return RequestEnded(outcome, "POST /pay", "asgi", KEY, 1, 0.05, **parts)


def test_series_begin_at_zero(registry: CollectorRegistry, sink: Any) -> None:
    """Series exist from the start, so that 0 differs from absent; those of an endpoint from its first request on."""
    for metric in COMMON:
        if metric.labels in ((), ("reason",), ("how",), ("kind",)) and metric.kind != "histogram":
            labels = [dict(zip(metric.labels, [value], strict=True)) for value in metric.closed] or [{}]
            assert [asked(registry, metric.prometheus, **each) for each in labels] == [0.0] * len(labels)
    sink(ended("ran"))
    counts = {
        outcome: asked(registry, "semel_requests_total", endpoint="POST /pay", door="asgi", outcome=outcome)
        for outcome in ENDED
    }
    assert counts == dict.fromkeys(ENDED, 0.0) | {"ran": 1.0}


def test_gauges_of_a_store_are_absent_until_it_is_surveyed(registry: CollectorRegistry, sink: Any) -> None:
    """Only a process that has counted what is in the store has gauges of it: elsewhere they would stand at 0."""
    assert not any(metric.name in generate_latest(registry).decode() for metric in OF_STORE)
    sink(StoreSurveyed(3, 2, 1, 4, None, 9.5, 0.0, outbox_pending=7, outbox_oldest=60.0, outbox_dead=1, inbox_parked=5))
    assert asked(registry, "semel_records", state="in_flight") == 3
    assert asked(registry, "semel_records", state="parked") == 1
    assert asked(registry, "semel_records", state="expired") is None
    assert asked(registry, "semel_oldest_seconds", what="in_flight") == 9.5
    assert asked(registry, "semel_oldest_seconds", what="outbox") == 60
    assert asked(registry, "semel_outbox_stored", state="dead") == 1
    assert asked(registry, "semel_inbox_parked") == 5


def test_durations(registry: CollectorRegistry, sink: Any) -> None:
    """Claims, handlers, stored answers and replays are measured, each where there was one."""
    sink(ended("ran", claim=PART, handler=PART, store=PART))
    sink(ended("replayed", claim=PART))
    names = ("claim", "handler", "store", "replay")
    assert [asked(registry, f"semel_{name}_seconds_count") for name in names] == [2, 1, 1, 1]
    assert asked(registry, "semel_replay_seconds_sum") == 0.05
    assert asked(registry, "semel_claim_seconds_bucket", le="0.025") == 2


@pytest.mark.parametrize(
    "event, name, labels",
    [
        (TookOver(KEY, 2), "semel_takeovers_total", {}),
        (Fenced(KEY, 1), "semel_fenced_total", {}),
        (LostLease(KEY, 1), "semel_lease_lost_total", {}),
        (ParkedUnknown(KEY, 1, "charge"), "semel_unknown_total", {}),
        (SweptUnknown(KEY, 1), "semel_unknown_total", {}),
        (GaveUpAbandoned(KEY, 8), "semel_unknown_total", {}),
        (NotStored(KEY, 1, "disk full"), "semel_not_stored_total", {}),
        (StoreFailed(KEY, "no route"), "semel_store_failed_total", {}),
        (Swept(KEY, 1, 4.0), "semel_swept_total", {}),
        (FinishedAccepted(KEY, 1, 200), "semel_completed_total", {"kind": "accepted"}),
        (FinishedAbandoned(KEY, 2, 200), "semel_completed_total", {"kind": "abandoned"}),
        (Reaped(1, 0, 0), "semel_reaped_total", {"how": "deleted"}),
        (Reported(KEY, "replay", "POST /pay"), "semel_reported_total", {"outcome": "replay"}),
        (Relayed("events", 1, 2, 3, 0), "semel_outbox_messages_total", {"to": "events", "outcome": "published"}),
        (MessageEnded("billing", "ran"), "semel_inbox_messages_total", {"consumer": "billing", "outcome": "ran"}),
        (ClientRetried("lost"), "semel_client_retries_total", {"reason": "lost"}),
    ],
    ids=lambda each: type(each).__name__ if not isinstance(each, str | dict) else "",
)
def test_counted(event: Event, name: str, labels: dict[str, str], registry: CollectorRegistry, sink: Any) -> None:
    """What happens is counted."""
    sink(event)
    assert asked(registry, name, **labels) == 1


def test_waiting(registry: CollectorRegistry, sink: Any) -> None:
    """The number of those who wait goes up and down."""
    for event in (WaitBegan(), WaitBegan(), WaitEnded()):
        sink(event)
    assert asked(registry, "semel_waiting") == 1


def test_what_has_no_metric_is_ignored(registry: CollectorRegistry, sink: Any) -> None:
    """An event without a metric of its own changes nothing."""
    before = generate_latest(registry)
    sink(NotKept(KEY, 200))
    assert generate_latest(registry) == before


def test_sums_and_counts_are_exact(registry: CollectorRegistry, sink: Any) -> None:
    """What several threads count at once is all there, in every bucket and in every sum."""
    seconds = (0.0, 0.0005, 0.0006, 0.02, 59.5, 61.0)
    each = 500

    def count() -> None:
        for number in range(each):
            part = Stretch(0.0, seconds[number % len(seconds)])
            sink(ended("ran", claim=part, handler=part, store=part))
            sink(MessageEnded("billing", "ran"))

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    total = 4 * each
    labels = {"endpoint": "POST /pay", "door": "asgi"}
    assert asked(registry, "semel_requests_total", outcome="ran", **labels) == total
    assert asked(registry, "semel_inbox_messages_total", consumer="billing", outcome="ran") == total
    of_each = [len(range(place, each, len(seconds))) * 4 for place in range(len(seconds))]
    for name in ("claim", "handler", "store"):
        assert asked(registry, f"semel_{name}_seconds_count") == total
        expected = sum(number * value for number, value in zip(of_each, seconds, strict=True))
        assert asked(registry, f"semel_{name}_seconds_sum") == pytest.approx(expected)
        # A bucket has what is as long as its limit, too.
        buckets = {"0.0005": 2, "0.001": 3, "0.025": 4, "60.0": 5, "+Inf": 6}
        assert {le: asked(registry, f"semel_{name}_seconds_bucket", le=le) for le in buckets} == {
            le: sum(of_each[:number]) for le, number in buckets.items()
        }


def test_it_shows_what_prometheus_clients_own_metrics_would(registry: CollectorRegistry, sink: Any) -> None:
    """Name, type, help and labels of each are as ``prometheus_client`` writes them for metrics of its own."""
    sink(ended("replayed", claim=PART))
    theirs = CollectorRegistry()
    for metric in COMMON:
        kind: Any = {"counter": Counter, "gauge": Gauge, "histogram": partial(Histogram, buckets=BUCKETS)}[metric.kind]
        made = kind(metric.name, metric.help, labelnames=metric.labels, registry=theirs)
        if metric.labels:
            made.labels(*("x" for _ in metric.labels))
    assert _heads(registry) == _heads(theirs)


def _heads(registry: CollectorRegistry) -> set[tuple[str, str, str, frozenset[tuple[str, frozenset[str]]]]]:
    return {
        (each.name, each.type, each.documentation, frozenset((one.name, frozenset(one.labels)) for one in samples))
        for each in registry.collect()
        if (samples := [one for one in each.samples if not one.name.endswith("_created")])
        and each.name not in {"semel_outbox_messages", "semel_inbox_messages"}
    }


def test_one_name_of_many(registry: CollectorRegistry, sink: Any) -> None:
    """A scrape of some metrics alone (``?name[]=``) has those, and no others."""
    sink(ended("ran", claim=PART))
    some = generate_latest(registry.restricted_registry(["semel_claim_seconds_count"])).decode()
    assert "semel_claim_seconds_count 1.0" in some
    assert "semel_requests" not in some


def test_two_in_one_registry(registry: CollectorRegistry, sink: Any) -> None:
    """A second one for the same registry, of an app's factory, is the first: nothing is counted twice."""
    for _ in range(2):
        assert use(Prometheus(registry)) is sink
    tell(TookOver("key", 2))
    drop(sink)
    assert asked(registry, "semel_takeovers_total") == 1
    for other in ({"buckets": (1.0, 2.0)}, {"traceparent": lambda: None}):
        with pytest.raises(ConfigurationError, match="other buckets"):
            Prometheus(registry, **other)


@pytest.mark.parametrize("buckets", [(), (1.0, 0.5), (1.0, 1.0), (float("inf"),)])
def test_odd_buckets(buckets: tuple[float, ...]) -> None:
    """Buckets that are none are refused at the start."""
    with pytest.raises(ValueError, match="rising order"):
        Prometheus(CollectorRegistry(), buckets=buckets)


def test_own_buckets() -> None:
    """The histograms have the buckets that were asked for; the last is without a limit, whether it is given or not."""
    for given in ((0.1, 1.0), (0.1, 1.0, float("inf"))):
        registry = CollectorRegistry()
        Prometheus(registry, buckets=given)(ended("ran", claim=PART))
        assert [asked(registry, "semel_claim_seconds_bucket", le=le) for le in ("0.1", "1.0", "+Inf")] == [1, 1, 1]


TRACED = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-0"


def test_exemplars(registry: CollectorRegistry, sink: Any) -> None:
    """A bucket has the trace of a request in it, in the OpenMetrics format; the usual format stays as it is."""
    sink(ended("ran", claim=PART, handler=PART, store=PART, trace=TRACED + "1"))
    sink(ended("replayed", claim=PART, trace=TRACED + "1"))
    shown = [line for line in openmetrics(registry).decode().splitlines() if " # {" in line]
    assert [line.partition("{")[0] for line in shown] == [
        f"semel_{name}_seconds_bucket" for name in ("claim", "handler", "store", "replay")
    ]
    assert all('le="0.025"' in line or 'le="0.05"' in line for line in shown)
    assert all('trace_id="0af7651916cd43dd8448eb211c80319c"' in line for line in shown)
    assert all('span_id="b7ad6b7169203331"' in line for line in shown)
    assert b"trace_id" not in generate_latest(registry)


@pytest.mark.parametrize("trace", [None, TRACED + "0", "zero1", "", "\ud8001"])
def test_no_exemplars(registry: CollectorRegistry, sink: Any, trace: str | None) -> None:
    """A trace that is not recorded leads to nothing, and what is none is none."""
    sink(ended("ran", claim=PART, trace=trace))
    assert b"trace_id" not in openmetrics(registry)
    assert asked(registry, "semel_claim_seconds_count") == 1


def test_traces_without_a_sink_for_opentelemetry(used: Callable[[Any], Any], registry: CollectorRegistry) -> None:
    """Prometheus alone has exemplars where it is told how the current trace is known."""
    used(Prometheus(registry, traceparent=lambda: TRACED + "1"))
    assert current_trace() == TRACED + "1"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks here")
def test_a_fork_while_another_thread_counts(registry: CollectorRegistry, sink: Any) -> None:
    """A child that was made while another thread was in the middle of a count counts all the same."""
    with sink._numbers._lock:
        child = os.fork()
        if child == 0:  # pragma: no cover - in the child
            signal.alarm(60)
            sink(ended("ran", claim=PART))
            os._exit(0 if asked(registry, "semel_claim_seconds_count") == 1 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
