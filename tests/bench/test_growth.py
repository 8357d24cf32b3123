"""The benches of large tables and many processes run, and say what they are asked to. No test asserts a time."""

from __future__ import annotations

import json

import pytest

from bench import filling, growth, layout, partitions, scale

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few operations, and a second of load."""
    for module, name, value in (
        (growth, "MANY", 4),
        (growth, "FEW", 2),
        (scale, "CONNECTIONS", 4),
        (scale, "WARM_SECONDS", 1),
        (scale, "SECONDS", 1),
    ):
        monkeypatch.setattr(module, name, value)


@pytest.mark.parametrize("store", ["postgres", "sqlite"])
def test_growth_prints_every_operation(store: str) -> None:
    """Each operation has its row, with what the database counted; and each part of the store its size."""
    found = growth.measure_growth([6000], [store], dead=3000)
    shown = growth.listed(found)
    facts = json.loads(growth.as_json(found))
    assert {"claim", "replay", "atomic, first", "reap of 1000", "survey"} < {
        each["operation"] for each in facts["costs"]
    }
    for cost in found.costs:
        assert f"{store}, {cost.operation} " in shown
        assert cost.work.pages is not None
    assert sum(found.sizes[0].parts.values()) > len(filling.BODY)


def test_layout_has_a_row_for_each_fillfactor() -> None:
    """Pages that leave room take answers without a change of an index, and more room."""
    sparse, full = layout.measure_layout([40, 100], keys=300)[2:4]
    assert (sparse.fillfactor, full.fillfactor) == (40, 100)
    assert sparse.hot is not None
    assert full.hot is not None
    assert sparse.hot > full.hot
    assert "guard" in layout.listed([sparse, full])


def test_partitions_are_dropped_and_not_deleted() -> None:
    """In the partitioned layout less is written to reap large answers; and keys in hash partitions have their rows."""
    found = partitions.measure_partitions(keys=1000)
    reaped = {(each.table, each.size): each.work.written for each in found if each.operation.startswith("reap")}
    assert (reaped["partitioned", 10_000] or 0) < (reaped["plain", 10_000] or 0) / 2
    assert reaped["partitioned", 264] == pytest.approx(reaped["plain", 264], rel=0.1)
    shown = partitions.listed(found)
    assert "16 hash partitions" in shown
    assert json.loads(partitions.as_json(found))


def test_scale_counts_connections() -> None:
    """With two workers, one connection each, the store has two, and the app and PostgreSQL have worked."""
    [found] = scale.measure_scale([2], "connections=1")
    assert found.connections <= 2
    assert found.server_us > 0
    assert found.postgres_us > 0
    assert "(1.0 each)" in scale.listed([found]) or found.connections == 1
