"""The report of a run: how many faults of each kind were reached, and how many violations. It judges nothing."""

from __future__ import annotations

import platform
import sqlite3
from collections.abc import Mapping, Sequence

import psycopg

import semel
from torture.scenario import Outcome, Plan, Scenario

_HEAD = ("fault", "reached", "of at least", "doubled", "lost", "stuck", "wrong")
#: Violations of one scenario that are shown; more would not help.
_SHOWN = 10


def versions(postgres: str) -> str:
    """Say what was run on what."""
    return (
        f"Semel {semel.__version__}, Python {platform.python_version()}, PostgreSQL {postgres}, "
        f"SQLite {sqlite3.sqlite_version}, psycopg {psycopg.__version__}"
    )


def minimum(scenario: Scenario, plan: Plan) -> int:
    """Return how many faults this run must reach: a shortened one proves nothing without a single one."""
    return scenario.minimum if plan.is_whole else 1


def is_good(scenario: Scenario, outcome: Outcome, plan: Plan) -> bool:
    """Whether nothing went wrong and enough was tried."""
    return not outcome.violations and outcome.reached >= minimum(scenario, plan)


def table(outcomes: Mapping[Scenario, Outcome], plan: Plan) -> str:
    """Return the table of faults and zeros."""
    rows = [
        (
            scenario.name,
            f"{outcome.reached:,}",
            f"{minimum(scenario, plan):,}",
            *(str(outcome.count(kind)) for kind in _HEAD[3:]),
        )
        for scenario, outcome in outcomes.items()
    ]
    widths = [max(len(row[column]) for row in [_HEAD, *rows]) for column in range(len(_HEAD))]
    lines = [_line(row, widths) for row in (_HEAD, tuple("-" * width for width in widths), *rows)]
    return "\n".join(lines)


def troubles(outcomes: Mapping[Scenario, Outcome], plan: Plan) -> str:
    """Return a line for each thing that went wrong; nothing where nothing did."""
    lines = []
    for scenario, outcome in outcomes.items():
        if outcome.reached < minimum(scenario, plan):
            lines.append(f"{scenario.name}: too few faults were reached")
        lines += [f"{scenario.name}: {violation}" for violation in outcome.violations[:_SHOWN]]
        if (more := len(outcome.violations) - _SHOWN) > 0:
            lines.append(f"{scenario.name}: and {more} more")
    return "\n".join(lines)


def sights(outcome: Outcome) -> str:
    """Say what the clients and workers saw."""
    return ", ".join(f"{sight} {number:,}" for sight, number in sorted(outcome.seen.items()) if number) or "nothing"


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    first, *rest = (
        cell.ljust(width) if column == 0 else cell.rjust(width) for column, (cell, width) in _cells(row, widths)
    )
    return "  ".join([first, *rest]).rstrip()


def _cells(row: Sequence[str], widths: Sequence[int]) -> enumerate[tuple[str, int]]:
    return enumerate(zip(row, widths, strict=True))
