"""Metrics for Prometheus."""

from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

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
from semel.telemetry.metrics import COMMON, OF_STORE
from semel.telemetry.prometheus import Prometheus

KEY = "0123456789ab"
PART = Stretch(0.0, 0.02)


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
