"""The metrics, as a table: name, kind, labels, meaning. Which sink has them is not said here, and no value is kept.

Prometheus and OpenTelemetry have the same ones; the reference page is written from this table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from semel.core.events import StoreSurveyed
from semel.core.outcome import ENDED, OUTCOMES, RETRY_REASONS

Kind = Literal["counter", "gauge", "histogram"]

#: Seconds. A claim takes about a millisecond, and a handler may take minutes.
BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric."""

    #: Without the suffix that Prometheus gives to counters.
    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    #: The values of its last label, where they are a closed list: those series exist from the start.
    closed: tuple[str, ...] = ()

    @property
    def prometheus(self) -> str:
        """The name in Prometheus."""
        return f"{self.name}_total" if self.kind == "counter" else self.name

    @property
    def opentelemetry(self) -> str:
        """The name in OpenTelemetry: parts with dots, and the unit apart."""
        if self.kind == "histogram":
            return "semel." + self.name.removeprefix("semel_").removesuffix("_seconds") + ".duration"
        return "semel." + self.name.removeprefix("semel_").removesuffix("_seconds").replace("_", ".", 1)

    @property
    def unit(self) -> str:
        """The unit in OpenTelemetry, by UCUM."""
        return "s" if self.name.endswith("_seconds") else "1"


REQUESTS = Metric(
    "semel_requests",
    "counter",
    "Requests to something guarded, by how they ended.",
    ("endpoint", "door", "outcome"),
    tuple(ENDED),
)
REPORTED = Metric(
    "semel_reported",
    "counter",
    "Requests in report mode, by what enforcing would have done.",
    ("outcome",),
    tuple(OUTCOMES),
)
CLAIM = Metric("semel_claim_seconds", "histogram", "Time to claim a key, or to find that it is taken.")
HANDLER = Metric("semel_handler_seconds", "histogram", "Time that the application's handler took.")
STORE = Metric("semel_store_seconds", "histogram", "Time to store an answer; in atomic mode, to commit.")
REPLAY = Metric("semel_replay_seconds", "histogram", "Time from a duplicate's arrival to its replayed answer.")
TAKEOVERS = Metric("semel_takeovers", "counter", "Operations taken over from a worker that died or gave up.")
FENCED = Metric("semel_fenced", "counter", "Answers discarded because another worker had taken the key over.")
LEASE_LOST = Metric("semel_lease_lost", "counter", "Handlers stopped because their lease was lost.")
UNKNOWN = Metric("semel_unknown", "counter", "Operations parked for an operator: their outcome is unknown.")
NOT_STORED = Metric("semel_not_stored", "counter", "Answers of handlers that ran and that could not be stored.")
STORE_FAILED = Metric("semel_store_failed", "counter", "Requests refused with 503 because the store failed.")
SWEPT = Metric("semel_swept", "counter", "Keys of dead workers that were freed.")
REAPED = Metric(
    "semel_reaped",
    "counter",
    "Records past retention that were cleared.",
    ("how",),
    ("deleted", "stripped", "abandoned"),
)
COMPLETED = Metric(
    "semel_completed", "counter", "Operations that a worker ran to their end.", ("kind",), ("accepted", "abandoned")
)
WAITING = Metric("semel_waiting", "gauge", "Duplicates that wait for the first request to end, now.")
OUTBOX = Metric(
    "semel_outbox_messages",
    "counter",
    "Messages that a relay has handled.",
    ("to", "outcome"),
    ("published", "failed", "dead", "fenced"),
)
INBOX = Metric(
    "semel_inbox_messages",
    "counter",
    "Deliveries to an inbox.",
    ("consumer", "outcome"),
    ("ran", "duplicate", "busy", "parked", "reused", "failed"),
)
CLIENT_RETRIES = Metric(
    "semel_client_retries", "counter", "Requests that Semel's client sent again.", ("reason",), tuple(RETRY_REASONS)
)
RECORDS = Metric(
    "semel_records",
    "gauge",
    "Records in the store that have not ended, and those past retention; counted up to a limit. From semel work alone.",
    ("state",),
    ("in_flight", "stuck", "parked", "accepted", "expired"),
)
OLDEST = Metric(
    "semel_oldest_seconds",
    "gauge",
    "Age of the oldest, in the store; 0: there is none. From semel work alone.",
    ("what",),
    ("in_flight", "accepted", "outbox"),
)
OUTBOX_WAITING = Metric(
    "semel_outbox_stored",
    "gauge",
    "Messages in the outbox, counted up to a limit. From semel work alone.",
    ("state",),
    ("pending", "dead"),
)
INBOX_PARKED = Metric(
    "semel_inbox_parked", "gauge", "Parked messages of the inbox, counted up to a limit. From semel work alone."
)
SURVEYED = Metric(
    "semel_store_surveyed_timestamp_seconds", "gauge", "When semel work last counted what is in the store."
)

#: Those that every process has.
COMMON = (
    REQUESTS,
    REPORTED,
    CLAIM,
    HANDLER,
    STORE,
    REPLAY,
    TAKEOVERS,
    FENCED,
    LEASE_LOST,
    UNKNOWN,
    NOT_STORED,
    STORE_FAILED,
    SWEPT,
    REAPED,
    COMPLETED,
    WAITING,
    OUTBOX,
    INBOX,
    CLIENT_RETRIES,
)
#: Those of a store, which one process counts for all.
OF_STORE = (RECORDS, OLDEST, OUTBOX_WAITING, INBOX_PARKED, SURVEYED)

METRICS = (*COMMON, *OF_STORE)


def surveyed(event: StoreSurveyed, now: float) -> Iterator[tuple[Metric, float | None, *tuple[str, ...]]]:
    """Return what the gauges of a store stand at, each with its labels; None: the store can't tell."""
    for state in RECORDS.closed:
        yield RECORDS, getattr(event, state), state
    yield OLDEST, event.oldest_in_flight, "in_flight"
    yield OLDEST, event.oldest_accepted, "accepted"
    yield OLDEST, event.outbox_oldest, "outbox"
    yield OUTBOX_WAITING, event.outbox_pending, "pending"
    yield OUTBOX_WAITING, event.outbox_dead, "dead"
    yield INBOX_PARKED, event.inbox_parked
    yield SURVEYED, now
