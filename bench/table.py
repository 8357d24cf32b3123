"""A report as people read it: one table, and what changed since another run. Nothing here measures."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from bench.cases import (
    GROWTH_GOAL_MB,
    POSTGRES_US_GOAL,
    POSTGRES_US_THEN,
    RECOVERY_GOAL_SECONDS,
    WAITING_GOAL_RATIO,
)
from bench.report import QUIET_CORES, Calls, Measured, Report, Slice, facts_of

HEAD = (
    "",
    "to reach",
    "then",
    "measured",
    "req/s",
    "server us",
    "PG us",
    "writers",
    "trips",
    "statements",
    "loaded",
    "WAL",
    "HOT",
    "alone ms",
)
EXPLAINED = """\
measured: throughput as part of the bare case above it, median (least-most) of the rounds; req/s where it is that case.
us: microseconds of processor time a request: of the web server, of PostgreSQL's connections, of its writers.
trips, statements: of a lone request to PostgreSQL; loaded: statements a request with all connections.
WAL: bytes a request. HOT: part of all updates. alone ms: median time of a request over one connection."""

#: What two runs are compared by: a title, where it is in the facts of a case, and how it is spelled.
COMPARED: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("ratio", ("ratio",), ".2f"),
    ("server us", ("loaded", "server_us"), ".0f"),
    ("PG us", ("loaded", "postgres_us"), ".0f"),
    ("WAL", ("loaded", "wal_bytes"), ".0f"),
    ("trips", ("traffic", "trips"), ".1f"),
    ("alone ms", ("alone", "p50_ms"), ".2f"),
)


class NoReport(ValueError):
    """This file is not the JSON of a run. Make one with: python -m bench --json > FILE."""


def table(report: Report) -> str:
    """Lay the report out."""
    parts = [_heading(report), _quiet(report)]
    if report.skipped:
        parts.append(f"no Redis here, so not measured: {', '.join(case.name for case in report.skipped)}")
    if rows := [*_case_rows(report), *_match_rows(report), *_goal_rows(report)]:
        parts += ["", *aligned([HEAD, *rows])]
    if report.measured:
        parts += ["", EXPLAINED]
    if report.calls:
        parts += ["", *call_rows(report.calls)]
    return "\n".join([*parts, *_growth_rows(report), *_waiting_rows(report), *_recovery_rows(report)])


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Set cells in columns: the first to the left, the others to the right. A row may end early."""
    widths = [max(len(row[n]) for row in rows if len(row) > n) for n in range(max(map(len, rows)))]
    lines = []
    for row in rows:
        cells = [f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=False)]
        lines.append("  ".join([f"{row[0]:{widths[0]}}", *cells]).rstrip())
    return lines


def _heading(report: Report) -> str:
    machine, plan = report.machine, report.plan
    versions = ", ".join(f"{name} {number}" for name, number in machine.versions.items() if number)
    pinned = "the server on a core of its own" if machine.is_pinned else "cores not shared out"
    return (
        f"{machine.date}, {machine.commit or 'commit unknown'}, {machine.cores} cores, {machine.system}\n{versions}\n"
        f"{plan.connections} connections, {plan.rounds} rounds of {plan.seconds:g} s; load by {report.sender}; {pinned}"
    )


def _quiet(report: Report) -> str:
    others = report.others_cores
    if not others:
        return "whether the machine was quiet is not known"
    is_quiet = statistics.median(others) <= QUIET_CORES
    verdict = "quiet" if is_quiet else "NOT QUIET: other processes were measured too, trust counts more than times"
    return f"others had {_spread(others, '.2f')} cores: {verdict}; load average before {report.machine.load_before:.2f}"


def _case_rows(report: Report) -> Iterable[tuple[str, ...]]:
    for each in report.measured:
        case = each.case
        rates = [one.per_second for one in each.loaded]
        is_baseline = case.baseline == case.name
        if is_baseline:
            yield ("",)
        yield (
            case.title,
            *_goals(case.goal, case.then),
            _spread(rates, ".0f") if is_baseline else _spread(report.ratios(each), ".2f"),
            _median(rates),
            *_costs(each.loaded),
            *_traffic(each),
            _column(each.loaded, lambda one: one.wal_bytes),
            "" if each.hot_share is None else f"{each.hot_share:.0%}",
            _column(each.alone, lambda one: one.p50_ms, ".2f"),
        )


def _costs(slices: Sequence[Slice]) -> tuple[str, str, str]:
    return (
        _column(slices, lambda one: one.server_us),
        _column(slices, lambda one: one.postgres_us),
        _column(slices, lambda one: one.writers_us),
    )


def _traffic(each: Measured) -> tuple[str, str, str]:
    counted = each.traffic
    if counted is None:
        return "", "", ""
    return f"{counted.trips:.1f}", f"{counted.statements:.1f}", f"{counted.loaded_statements:.2f}"


def _match_rows(report: Report) -> Iterable[tuple[str, ...]]:
    matches = report.matches()
    if matches:
        yield ("",)
    for match, alone, loaded in matches:
        ours = next(each for each in report.measured if each.case.name == match.case)
        goals = _goals(match.goal, match.then)
        rate = _median([one.per_second for one in ours.alone])
        yield (f"1 connection, {match.title}", *goals, _spread(alone, ".2f"), rate, *_costs(ours.alone))
        yield (f"{report.plan.connections} connections, {match.title}", "", "", _spread(loaded, ".2f"))


def _goal_rows(report: Report) -> Iterable[tuple[str, ...]]:
    """Those goals that are no ratios."""
    rows = []
    for each in report.measured:
        figures = [one.postgres_us for one in each.loaded if one.postgres_us is not None]
        if each.case.name == "postgres-first" and figures:
            goals = (f"<= {POSTGRES_US_GOAL:.0f}", f"{POSTGRES_US_THEN:.0f}")
            rows.append(("PG us per first", *goals, _spread(figures, ".0f")))
    rows += [
        (f"calls, {each.request}", f"<= {each.goal}", str(each.then), str(each.calls))
        for each in report.calls
        if each.goal
    ]
    return [("",), *rows] if rows else []


def call_rows(calls: Sequence[Calls]) -> list[str]:
    """Lay out what requests made inside Semel."""
    rows: list[tuple[str, ...]] = [("", "calls", "to reach", "then", "files", "objects", "coroutines", "tasks")]
    for each in calls:
        figures = (each.files, each.objects, each.coroutines, each.tasks)
        goals = (f"<= {each.goal}" if each.goal else "", str(each.then or ""))
        name = f"{each.store}, {each.request}"
        rows.append((name, str(each.calls), *goals, *map(str, figures)))
    return aligned(rows)


def _growth_rows(report: Report) -> list[str]:
    rows = [
        (f"memory after {report.plan.growth_keys} keys, {each.case.name}", f"< {GROWTH_GOAL_MB:.0f} MB", _grown(each))
        for each in report.growth
    ]
    return ["", *aligned(rows)] if rows else []


def _grown(each: Any) -> str:
    return f"{each.grown_mb:+.1f} MB"


def _waiting_rows(report: Report) -> list[str]:
    waiting = report.waiting
    if waiting is None:
        return []
    rows = [
        ("statements a second of all that wait", "<= 1", _spread(waiting.per_second, ".1f")),
        ("p99 ms of others, none waits", "", _spread(waiting.before_ms, ".1f")),
        ("p99 ms of others, all wait", "", _spread(waiting.meanwhile_ms, ".1f")),
        ("  of that before", f"<= {WAITING_GOAL_RATIO:g}", _spread(waiting.ratios, ".2f")),
        ("p99 ms of others, all are answered", "", _spread(waiting.ending_ms, ".1f")),
        ("seconds until the last is answered", "", _spread(waiting.answered_seconds, ".2f")),
    ]
    beside = f"{report.plan.beside_per_second:g} requests a second with others"
    return ["", f"{waiting.waiters} wait for one key, {beside}", *aligned(rows)]


def _recovery_rows(report: Report) -> list[str]:
    rows = [
        (
            f"takeover={'instant' if each.is_instant else 'lease'}, lease {each.lease_seconds:g} s",
            f"< {RECOVERY_GOAL_SECONDS:g}" if each.is_instant else "",
            _spread(each.seconds, ".2f"),
        )
        for each in report.recovery
    ]
    return ["", "seconds from kill -9 in a handler to the answer of a retry", *aligned(rows)] if rows else []


def comparison(report: Report, file: Path) -> str:
    """Set this run beside the run that *file* has: earlier, then now."""
    earlier = read_facts(file)
    now = json.loads(json.dumps(facts_of(report)))
    rows: list[tuple[str, ...]] = [("", *(title for title, _, _ in COMPARED))]
    for name, case in now["cases"].items():
        if name in earlier["cases"]:
            before = earlier["cases"][name]
            rows.append((name, *(_change(before, case, path, spelled) for _, path, spelled in COMPARED)))
    counted = {(each["store"], each["request"]): each["calls"] for each in earlier["calls"]}
    rows += [
        (f"calls: {each['store']}, {each['request']}", f"{known} > {each['calls']}")
        for each in now["calls"]
        if (known := counted.get((each["store"], each["request"]))) is not None
    ]
    heading = f"\n{file}, {earlier['date']}, {earlier['commit']} > this run (a fifth is noise)"
    return "\n".join([heading, *aligned(rows)])


def read_facts(file: Path) -> dict[str, Any]:
    """Read what ``--json`` printed."""
    try:
        facts = json.loads(file.read_text())
    except OSError as error:
        raise NoReport(f"{file} can't be read: {error.strerror}. Name a file made with --json.") from error
    except ValueError as error:
        raise NoReport(f"{file}: {NoReport.__doc__}") from error
    if not isinstance(facts, dict) or not {"cases", "calls", "date", "commit"} <= facts.keys():
        raise NoReport(f"{file}: {NoReport.__doc__}")
    return facts


def _change(before: Any, now: Any, path: tuple[str, ...], spelled: str) -> str:
    one, other = _at(before, path), _at(now, path)
    return "" if one is None or other is None else f"{one:{spelled}} > {other:{spelled}}"


def _at(facts: Any, path: tuple[str, ...]) -> float | None:
    for name in path:
        facts = facts.get(name) if facts else None
    if isinstance(facts, list):
        figures = [figure for figure in facts if figure is not None]
        return statistics.median(figures) if figures else None
    return None if facts is None else float(facts)


def _goals(goal: float | None, then: float | None) -> tuple[str, str]:
    return (f">= {goal:.2f}" if goal else "", f"{then:.2f}" if then else "")


def _column(slices: Sequence[Slice], figure: Callable[[Slice], float | None], spelled: str = ".0f") -> str:
    figures = [found for one in slices if (found := figure(one)) is not None]
    return _median(figures, spelled) if figures else ""


def _median(figures: Sequence[float], spelled: str = ".0f") -> str:
    return f"{statistics.median(figures):{spelled}}"


def _spread(figures: Sequence[float], spelled: str) -> str:
    return f"{_median(figures, spelled)} ({min(figures):{spelled}}-{max(figures):{spelled}})"
