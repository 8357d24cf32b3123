"""The bench runs. How fast anything is, no test asserts: a machine has neighbours."""

import json

from bench.cases import CASES, Plan
from bench.measure import measure
from bench.report import as_json, table

TINY = Plan(
    connections=4,
    rounds=1,
    seconds=0.2,
    replayed_keys=40,
    growth_keys=200,
    warm_up_requests=40,
    counted_requests=10,
    sender="own",
)


def test_bench_prints_every_row() -> None:
    """A very small run ends, and its table and its JSON have every figure."""
    report = measure(TINY)
    shown = table(report)
    for case in CASES:
        assert sum(line.startswith(f"{case.title:20}") for line in shown.splitlines()) == 2
    for what in (
        "WAL bytes per replay",
        "WAL bytes per request, one INSERT, atomic",
        "memory after 200 keys, PostgreSQL",
        "memory after 200 keys, SQLite",
        "our own client",
    ):
        assert what in shown
    spelled = json.loads(as_json(report))
    assert spelled["throughput"].keys() == spelled["latency"].keys() == {case.name for case in CASES}
    # Few requests are counted, and a statement of the server's sweeper or completer may come in between.
    assert 2 <= spelled["latency"]["postgres-first"]["statements"] < 2.5
    assert 1 <= spelled["latency"]["postgres-replay"]["statements"] < 1.5
    assert spelled["wal_bytes_per_write"].keys() == {case.name for case in CASES if case.writes}
