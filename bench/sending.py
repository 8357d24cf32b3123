"""What the client costs: ``python -m bench client``. There is no network in it: the transport that is wrapped answers
at once, so that the difference is Semel's own. What a request costs in all is in no row.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx2

from semel.client import Journal
from semel.client.httpx import IdempotentTransport

#: Rounds of each, in turns, so that a busy moment is no row's own.
ROUNDS = 25
REQUESTS = 300
JOURNALED = 60
BODY = b'{"amount": 100, "currency": "eur"}'
HEADERS = {"Content-Type": "application/json"}

#: Microseconds of the client's own time for each request.
GOAL = 20.0


@dataclass(frozen=True)
class Cost:
    """One row: microseconds for each request, beyond those of the bare transport. Of the processor, without a journal;
    on the clock, with one, since it waits.
    """

    name: str
    microseconds: float
    goal: float | None = None
    #: How often it waited for the disk.
    fsyncs: float | None = None


def measure_client() -> list[Cost]:
    """Measure a request with a key, and one with a journal."""
    bare, keyed = _Answering(), IdempotentTransport(_Answering())
    with tempfile.TemporaryDirectory() as folder, Journal(Path(folder) / "bench.journal") as journal:
        kept = IdempotentTransport(_Answering(), journal=journal)
        names = itertools.count()

        def intent() -> dict[str, Any]:
            return {"semel.intent": f"intent {next(names)}"}

        rows: dict[str, list[float]] = {"bare": [], "keyed": [], "kept": [], "disk": []}
        for _ in range(ROUNDS):
            rows["bare"].append(_timed(bare, REQUESTS))
            rows["keyed"].append(_timed(keyed, REQUESTS))
            rows["kept"].append(_timed(kept, JOURNALED, intent, time.perf_counter))
            rows["disk"].append(_disk(Path(folder) / "disk", JOURNALED))
        fsyncs = _fsyncs(Path(folder) / "counted.journal")
    median = {name: statistics.median(times) for name, times in rows.items()}
    return [
        # The least: whatever else this machine does adds to it.
        Cost("with a key", min(rows["keyed"]) - min(rows["bare"]), GOAL),
        Cost("with a journal", median["kept"] - median["bare"], fsyncs=fsyncs),
        Cost("one fsync of this disk", median["disk"]),
    ]


def listed(rows: list[Cost]) -> str:
    """Return the lines for a terminal."""
    lines = ["client: microseconds of each request, beyond the bare transport's"]
    for row in rows:
        goal = f"  goal {row.goal:.0f}" if row.goal is not None else ""
        waits = f"  {row.fsyncs:.2f} fsyncs each" if row.fsyncs is not None else ""
        lines.append(f"  {row.name:<24}{row.microseconds:>9.1f}{goal}{waits}")
    return "\n".join(lines)


def as_json(rows: list[Cost]) -> str:
    """Return JSON."""
    return json.dumps([asdict(row) for row in rows], indent=2)


class _Answering(httpx2.BaseTransport):
    """Answers at once."""

    def handle_request(self, _request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(201, stream=httpx2.ByteStream(b'{"id": 17}'))


def _timed(
    transport: Any,
    count: int,
    extensions: Callable[[], dict[str, Any]] = dict,
    clock: Callable[[], float] = time.process_time,
) -> float:
    requests = [
        httpx2.Request("POST", "https://api.example/pay", headers=HEADERS, content=BODY, extensions=extensions())
        for _ in range(count)
    ]
    gc.collect()
    gc.freeze()  # Looking through requests that wait to be sent is no part of sending one.
    began = clock()
    for request in requests:
        transport.handle_request(request)
    return (clock() - began) / count * 1e6


def _disk(path: Path, count: int) -> float:
    """Return how long one page takes to be on the disk."""
    with path.open("wb", buffering=0) as file:
        began = time.perf_counter()
        for _ in range(count):
            file.write(bytes(4096))
            os.fdatasync(file.fileno())
        return (time.perf_counter() - began) / count * 1e6


def _fsyncs(path: Path) -> float:
    """Count what a journal waits for, by the writes that SQLite says are to be on the disk: it commits with FULL once.

    A checkpoint of its log, every thousand pages, waits too; it is left to the times.
    """
    with Journal(path) as journal:
        said: list[str] = []
        opened = journal._connection.opened  # noqa: SLF001 - no other eye sees it
        assert opened is not None  # noqa: S101 - it was opened above
        opened.set_trace_callback(said.append)
        transport = IdempotentTransport(_Answering(), journal=journal)
        _timed(transport, 10, iter([{"semel.intent": f"n {number}"} for number in range(10)]).__next__)
    return _synced(said) / 10


def _synced(statements: list[str]) -> int:
    is_full, is_open, count = True, False, 0
    for statement in statements:
        words = statement.split()
        if words[:2] == ["PRAGMA", "synchronous"]:
            is_full = words[-1] == "FULL"
        elif words[0] == "BEGIN":
            is_open = True
        elif words[0] == "COMMIT":
            is_open = False
            count += is_full
        elif words[0] in {"INSERT", "UPDATE", "DELETE"} and not is_open:
            count += is_full
    return count
