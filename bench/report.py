"""What was measured, as values, as a table for people and as JSON for programs. Nothing here measures."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import sqlite3
import statistics
import time
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Self

from bench.cases import (
    GROWTH_TARGET_MB,
    RECOVERY_TARGET_SECONDS,
    WAITING_TARGET_PER_SECOND,
    WAITING_TARGET_RATIO,
    WAL_TARGET_BYTES,
    Case,
    Plan,
)

PACKAGES = ("uvicorn", "uvloop", "httptools", "starlette", "asyncpg", "redis")
BELOW = "  <-- MISSED"


@dataclass(frozen=True, slots=True)
class Machine:
    """Where and when it was measured: without that, a figure means nothing."""

    date: str
    cores: int
    system: str
    versions: dict[str, str]
    #: How many processes wanted to run before we came. Near 0 is a quiet machine.
    load_before: float

    @classmethod
    def this(cls, servers: dict[str, str], load_before: float) -> Self:
        """Describe this machine, with the database *servers* that were started for the run."""
        versions = {"Python": platform.python_version(), **servers, "SQLite": sqlite3.sqlite_version}
        versions |= {name: version(name) for name in PACKAGES}
        return cls(time.strftime("%Y-%m-%d"), os.cpu_count() or 0, platform.platform(), versions, load_before)


@dataclass(frozen=True, slots=True)
class Throughput:
    """Requests a second in each round, beside those of the app it is compared with in the same round."""

    case: Case
    rates: tuple[float, ...]
    #: Seconds of the server's own CPU for each request. A neighbour on the machine disturbs it less than a rate.
    cpu: tuple[float, ...]
    baseline: tuple[float, ...]

    @property
    def ratios(self) -> tuple[float, ...]:
        """What is left of the other's throughput, round by round: a slow round is slow for both."""
        return tuple(rate / other for rate, other in zip(self.rates, self.baseline, strict=True))


@dataclass(frozen=True, slots=True)
class Latency:
    """How long a lone request takes: the median of each round."""

    case: Case
    p50_ms: tuple[float, ...]
    statements: float | None


@dataclass(frozen=True, slots=True)
class Growth:
    """A server's memory before and after many new keys."""

    case: Case
    before_mb: float
    after_mb: float

    @property
    def grown_mb(self) -> float:
        """How much more it holds."""
        return self.after_mb - self.before_mb


@dataclass(frozen=True, slots=True)
class Waiting:
    """What many who wait for one key cost, in each round."""

    waiters: int
    #: Statements of all of them together.
    per_second: tuple[float, ...]
    #: How long requests with other keys take, 99 of 100: when nobody waits, while all wait, while all are answered.
    before_ms: tuple[float, ...]
    meanwhile_ms: tuple[float, ...]
    ending_ms: tuple[float, ...]
    #: From the end of the first to the last one's answer.
    answered_seconds: tuple[float, ...]

    @property
    def is_busy(self) -> bool:
        """Whether they ask more often than they should. Times are looked at so often that a tenth can be seen."""
        return round(statistics.median(self.per_second), 1) > WAITING_TARGET_PER_SECOND

    @property
    def ratios(self) -> tuple[float, ...]:
        """How much longer requests with other keys take, round by round."""
        return tuple(one / other for one, other in zip(self.meanwhile_ms, self.before_ms, strict=True))


@dataclass(frozen=True, slots=True)
class Recovery:
    """From the death of a worker in mid-handler to the answer that a retry gets elsewhere, each time."""

    #: Whether the store is asked who is alive; otherwise only the lease says so.
    is_instant: bool
    lease_seconds: float
    seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that one run measured."""

    #: What was asked for, and which cases of it there was no server for.
    plan: Plan
    skipped: tuple[Case, ...]
    machine: Machine
    sender: str
    throughput: tuple[Throughput, ...]
    latency: tuple[Latency, ...]
    #: In each pass over all replayed keys.
    wal_bytes_per_replay: tuple[float, ...]
    #: For each request of a handler that writes, with whatever else the server logs meanwhile.
    wal_bytes_per_write: tuple[tuple[Case, float], ...]
    growth: tuple[Growth, ...]
    waiting: Waiting | None
    recovery: tuple[Recovery, ...]


def table(report: Report) -> str:
    """Lay the report out for people."""
    plan = report.plan
    parts = [_heading(report)]
    if report.skipped:
        parts.append(f"no Redis here, so not measured: {', '.join(case.name for case in report.skipped)}\n")
    if report.throughput:
        parts += [
            f"{plan.connections} connections, {plan.rounds} rounds of {plan.seconds:g} s, median (least-most)",
            *_throughput_rows(report.throughput),
            "",
            "1 connection",
            *_latency_rows(report.latency),
            "",
        ]
    return "\n".join(parts + _other_rows(report) + _waiting_rows(report) + _recovery_rows(report))


def as_json(report: Report) -> str:
    """Spell the report for programs."""
    machine = report.machine
    facts: dict[str, Any] = {
        "date": machine.date,
        "cores": machine.cores,
        "system": machine.system,
        "versions": machine.versions,
        "load_before": machine.load_before,
        "sender": report.sender,
        "connections": report.plan.connections,
        "throughput": {
            each.case.name: {"per_second": each.rates, "of_baseline": each.ratios, "cpu_seconds": each.cpu}
            for each in report.throughput
        },
        "latency": {each.case.name: {"p50_ms": each.p50_ms, "statements": each.statements} for each in report.latency},
        "wal_bytes_per_replay": report.wal_bytes_per_replay,
        "wal_bytes_per_write": {case.name: logged for case, logged in report.wal_bytes_per_write},
        "growth_mb": {each.case.name: each.grown_mb for each in report.growth},
        "growth_keys": report.plan.growth_keys,
        "waiting": report.waiting and dataclasses.asdict(report.waiting),
        "recovery": [dataclasses.asdict(each) for each in report.recovery],
        "skipped": [case.name for case in report.skipped],
    }
    return json.dumps(facts, indent=2)


def _heading(report: Report) -> str:
    machine = report.machine
    versions = ", ".join(f"{name} {number}" for name, number in machine.versions.items() if number)
    return (
        f"{machine.date}, {machine.cores} cores, {machine.system}\n{versions}\n"
        f"load by {report.sender}; load average before the run {machine.load_before:.2f}\n"
    )


def _throughput_rows(measured: tuple[Throughput, ...]) -> list[str]:
    rows = [f"{'':20}{'requests/s':>22}{'of baseline':>20}{'target':>9}{'server CPU':>13}"]
    for each in measured:
        if each.case.baseline == each.case.name:
            rows.append("")
        rate, ratio = _spread(each.rates, ".0f"), _spread(each.ratios, ".2f")
        target = each.case.target
        hoped = f">= {target:.2f}" if target else ""
        cpu = f"{statistics.median(each.cpu) * 1e6:.0f} us"
        missed = target is not None and statistics.median(each.ratios) < target
        rows.append(f"{each.case.title:20}{rate:>22}{ratio:>20}{hoped:>9}{cpu:>13}{BELOW * missed}")
    return rows


def _latency_rows(measured: tuple[Latency, ...]) -> list[str]:
    rows = [f"{'':20}{'p50 ms':>22}{'statements':>20}"]
    for each in measured:
        statements = "" if each.statements is None else f"{each.statements:.2f}"
        rows.append(f"{each.case.title:20}{_spread(each.p50_ms, '.2f'):>22}{statements:>20}")
    return rows


def _other_rows(report: Report) -> list[str]:
    rows = []
    wal = report.wal_bytes_per_replay
    if wal:
        missed = statistics.median(wal) > WAL_TARGET_BYTES
        rows.append(f"WAL bytes per replay, PostgreSQL, {len(wal)} passes: {_spread(wal, '.2f')}   = 0{BELOW * missed}")
    rows += [f"WAL bytes per request, {case.title:24}{logged:>8.0f}" for case, logged in report.wal_bytes_per_write]
    for each in report.growth:
        what = f"memory after {report.plan.growth_keys} keys, {each.case.title.removesuffix(', first')}"
        missed = each.case.store is not None and each.grown_mb >= GROWTH_TARGET_MB
        hoped = f"< {GROWTH_TARGET_MB:.0f}" if each.case.store else ""
        rows.append(f"{what:36}{each.grown_mb:>+6.1f} MB   {hoped:>9}{BELOW * missed}")
    return rows


def _waiting_rows(report: Report) -> list[str]:
    waiting = report.waiting
    if waiting is None:
        return []
    missed = statistics.median(waiting.ratios) > WAITING_TARGET_RATIO
    return [
        "",
        f"{waiting.waiters} wait for one key, {report.plan.beside_per_second:g} requests a second with others",
        _row("statements a second of all who wait", waiting.per_second, "<= 1", waiting.is_busy),
        _row("p99 ms of others, nobody waits", waiting.before_ms),
        _row("p99 ms of others, all wait", waiting.meanwhile_ms),
        _row("  of that before", waiting.ratios, f"<= {WAITING_TARGET_RATIO:g}", missed, ".2f"),
        _row("p99 ms of others, all are answered", waiting.ending_ms),
        _row("seconds until the last is answered", waiting.answered_seconds, spelled=".2f"),
    ]


def _recovery_rows(report: Report) -> list[str]:
    rows = []
    for each in report.recovery:
        missed = each.is_instant and statistics.median(each.seconds) >= RECOVERY_TARGET_SECONDS
        hoped = f"< {RECOVERY_TARGET_SECONDS:g}" if each.is_instant else ""
        how = "takeover=instant" if each.is_instant else "takeover=lease"
        rows.append(_row(f"{how}, lease {each.lease_seconds:g} s", each.seconds, hoped, missed, ".2f"))
    return ["", "seconds from kill -9 in a handler to the answer of a retry", *rows] if rows else []


def _row(what: str, figures: tuple[float, ...], hoped: str = "", missed: bool = False, spelled: str = ".1f") -> str:  # noqa: FBT001, FBT002 - a row of five columns
    return f"{what:36}{_spread(figures, spelled):>22}{hoped:>9}{BELOW * missed}".rstrip()


def _spread(figures: tuple[float, ...], spelled: str) -> str:
    median = statistics.median(figures)
    return f"{median:{spelled}} ({min(figures):{spelled}}-{max(figures):{spelled}})"
