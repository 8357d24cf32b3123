"""The bench runs. How fast anything is, no test asserts: a machine has neighbours."""

import dataclasses
import json
from typing import NoReturn

import pytest

from bench.cases import CASES, Plan
from bench.measure import measure
from bench.report import as_json, table
from semel.testing import servers
from semel.testing.servers.programs import REDIS

TINY = Plan(
    connections=4,
    rounds=1,
    seconds=0.2,
    replayed_keys=40,
    growth_keys=200,
    warm_up_requests=40,
    counted_requests=10,
    waiters=20,
    waiting_seconds=0.5,
    waiting_rounds=1,
    settling_seconds=0,
    beside_per_second=40,
    recoveries=1,
    short_lease_seconds=0.5,
    sender="own",
)


@pytest.mark.slow
@pytest.mark.usefixtures("redis_server")
def test_bench_prints_every_row() -> None:
    """A very small run ends, and its table and its JSON have every figure."""
    report = measure(dataclasses.replace(TINY, extras=()))
    shown = table(report)
    for case in CASES:
        assert sum(line.startswith(f"{case.title:20}") for line in shown.splitlines()) == 2
    for what in (
        "WAL bytes per replay",
        "WAL bytes per request, one INSERT, atomic",
        "memory after 200 keys, PostgreSQL",
        "memory after 200 keys, SQLite",
        "memory after 200 keys, Redis",
        "appendonly yes, appendfsync everysec",
        "our own client",
    ):
        assert what in shown
    spelled = json.loads(as_json(report))
    assert spelled["throughput"].keys() == spelled["latency"].keys() == {case.name for case in CASES}
    # Few requests are counted, and a statement of the server's sweeper or completer may come in between.
    assert 2 <= spelled["latency"]["postgres-first"]["statements"] < 2.5
    assert 1 <= spelled["latency"]["postgres-replay"]["statements"] < 1.5
    # From process memory, or from Redis: PostgreSQL is not asked.
    assert 0 <= spelled["latency"]["tiered-replay"]["statements"] < 0.5
    assert 0 <= spelled["latency"]["tiered-redis-replay"]["statements"] < 0.5
    assert spelled["wal_bytes_per_write"].keys() == {case.name for case in CASES if case.writes}


def test_bench_prints_what_waiting_and_dying_cost() -> None:
    """Duplicates that wait get one answer, a killed worker's client gets one from another; and each has its rows."""
    report = measure(dataclasses.replace(TINY, cases=()))
    shown = table(report)
    for what in (
        "20 wait for one key, 40 requests a second with others",
        "statements a second of all who wait",
        "p99 ms of others, all wait",
        "takeover=instant, lease 30 s",
        "takeover=lease, lease 0.5 s",
    ):
        assert what in shown
    spelled = json.loads(as_json(report))
    assert spelled["waiting"]["waiters"] == 20
    assert [each["is_instant"] for each in spelled["recovery"]] == [True, False]


def test_without_redis_the_others_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no Redis, its cases are named as left out, and the rest is measured."""

    def nowhere(**_: object) -> NoReturn:
        raise servers.NoServerBinary(REDIS)

    monkeypatch.setattr(servers, "redis", nowhere)
    cases = tuple(case for case in CASES if case.name in {"bare", "redis-first", "tiered-replay"})
    report = measure(dataclasses.replace(TINY, cases=cases, extras=()))
    assert "not measured: redis-first, tiered-replay" in table(report)
    assert json.loads(as_json(report))["throughput"].keys() == {"bare"}
