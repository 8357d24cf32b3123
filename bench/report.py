"""What was measured, as values, and as JSON for programs. Nothing here measures; how it looks is for ``table``."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import shutil
import sqlite3
import statistics
import subprocess
import time
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Self

from bench.cases import MATCHES, WAITING_GOAL_PER_SECOND, Case, Match, Plan
from bench.load import ROOT

PACKAGES = ("uvicorn", "uvloop", "httptools", "starlette", "asyncpg", "redis")
#: More of a core than this that others had, in the median slice, and the run is not quiet.
QUIET_CORES = 0.10


@dataclass(frozen=True, slots=True)
class Machine:
    """Where and when it was measured: without that, a figure means nothing."""

    date: str
    #: Of the source, where it is known.
    commit: str
    cores: int
    system: str
    versions: dict[str, str]
    #: How many processes wanted to run before we came.
    load_before: float
    #: Whether the server had a core of its own, and the rest the others.
    is_pinned: bool

    @classmethod
    def this(cls, servers: dict[str, str], load_before: float, *, is_pinned: bool) -> Self:
        """Describe this machine, with the database *servers* that were started for the run."""
        versions = {"Python": platform.python_version(), **servers, "SQLite": sqlite3.sqlite_version}
        versions |= {name: version(name) for name in PACKAGES}
        now, cores = time.strftime("%Y-%m-%d %H:%M"), os.cpu_count() or 0
        return cls(now, _commit(), cores, platform.platform(), versions, load_before, is_pinned)


def _commit() -> str:
    git = shutil.which("git")
    if git is None:
        return ""
    command = [git, "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


@dataclass(frozen=True, slots=True)
class Slice:
    """One case in one round. What is None was not measured: it does not apply, or this system can't tell."""

    per_second: float
    p50_ms: float
    #: Microseconds of processor time, and bytes, for each request.
    server_us: float
    #: Of the processes that serve connections, and of all others of PostgreSQL's.
    postgres_us: float | None = None
    writers_us: float | None = None
    wal_bytes: float | None = None
    #: How many cores processes that are not ours had meanwhile.
    others_cores: float | None = None


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one request sends to PostgreSQL, counted on the wire."""

    #: Of a lone request.
    trips: float
    statements: float
    #: With all connections, which share statements.
    loaded_statements: float


@dataclass(frozen=True, slots=True)
class Measured:
    """One case: in each round under load, in each round over one connection, and what was counted by itself."""

    case: Case
    loaded: tuple[Slice, ...]
    alone: tuple[Slice, ...]
    traffic: Traffic | None
    #: The part of all updates in its database that was HOT.
    hot_share: float | None


@dataclass(frozen=True, slots=True)
class Calls:
    """What one request made inside Semel: the median of several, since a timer may fall into one."""

    store: str
    request: str
    goal: int | None
    then: int | None
    #: Of functions with their source in the package, and how many files these are in.
    calls: int
    files: int
    #: Of the package's own classes.
    objects: int
    #: Coroutines and generators, which are among the calls as well.
    coroutines: int
    #: Of the loop, those of the driver included.
    tasks: int


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
    """What many that wait for one key cost, in each round."""

    waiters: int
    #: Statements of all of them together.
    per_second: tuple[float, ...]
    #: How long requests with other keys take, 99 of 100: when none waits, while all wait, while all are answered.
    before_ms: tuple[float, ...]
    meanwhile_ms: tuple[float, ...]
    ending_ms: tuple[float, ...]
    #: From the end of the first to the last one's answer.
    answered_seconds: tuple[float, ...]

    @property
    def is_busy(self) -> bool:
        """Whether they ask more often than they should. Times are looked at so often that a tenth can be seen."""
        return round(statistics.median(self.per_second), 1) > WAITING_GOAL_PER_SECOND

    @property
    def ratios(self) -> tuple[float, ...]:
        """How much longer requests with other keys take, round by round."""
        return tuple(one / other for one, other in zip(self.meanwhile_ms, self.before_ms, strict=True))


@dataclass(frozen=True, slots=True)
class Recovery:
    """The time from the death of a worker during its handler to the answer of a retry at another, each time."""

    #: Whether the store is asked which worker is alive; otherwise only the lease says so.
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
    measured: tuple[Measured, ...]
    calls: tuple[Calls, ...]
    growth: tuple[Growth, ...]
    waiting: Waiting | None
    recovery: tuple[Recovery, ...]

    def ratios(self, each: Measured) -> tuple[float, ...]:
        """What is left of the baseline's throughput, round by round: a slow round is slow for both."""
        return _ratios(each.loaded, self._named(each.case.baseline).loaded)

    def matches(self) -> list[tuple[Match, tuple[float, ...], tuple[float, ...]]]:
        """Our throughput as part of the control's: over one connection, and over all."""
        names = {each.case.name for each in self.measured}
        there = [match for match in MATCHES if {match.case, match.control} <= names]
        pairs = [(match, self._named(match.case), self._named(match.control)) for match in there]
        return [(match, _ratios(a.alone, b.alone), _ratios(a.loaded, b.loaded)) for match, a, b in pairs]

    @property
    def others_cores(self) -> tuple[float, ...]:
        """How many cores others had, slice by slice. Empty where this system can't tell."""
        slices = [one for each in self.measured for one in (*each.loaded, *each.alone)]
        return tuple(one.others_cores for one in slices if one.others_cores is not None)

    def _named(self, name: str) -> Measured:
        return next(each for each in self.measured if each.case.name == name)


def _ratios(these: tuple[Slice, ...], those: tuple[Slice, ...]) -> tuple[float, ...]:
    return tuple(one.per_second / other.per_second for one, other in zip(these, those, strict=True))


def facts_of(report: Report) -> dict[str, Any]:
    """Spell the report as plain values: this is what ``--json`` prints, and what runs are compared by."""
    return {
        **dataclasses.asdict(report.machine),
        "sender": report.sender,
        "connections": report.plan.connections,
        "others_cores": report.others_cores,
        "cases": {
            each.case.name: {
                "ratio": report.ratios(each),
                "loaded": _columns(each.loaded),
                "alone": _columns(each.alone),
                "traffic": each.traffic and dataclasses.asdict(each.traffic),
                "hot_share": each.hot_share,
            }
            for each in report.measured
        },
        "of_control": {match.case: {"alone": alone, "loaded": loaded} for match, alone, loaded in report.matches()},
        "calls": [dataclasses.asdict(each) for each in report.calls],
        "growth_mb": {each.case.name: each.grown_mb for each in report.growth},
        "growth_keys": report.plan.growth_keys,
        "waiting": report.waiting and dataclasses.asdict(report.waiting),
        "recovery": [dataclasses.asdict(each) for each in report.recovery],
        "skipped": [case.name for case in report.skipped],
    }


def as_json(report: Report) -> str:
    """Spell the report for programs."""
    return json.dumps(facts_of(report), indent=2)


def _columns(slices: tuple[Slice, ...]) -> dict[str, list[float | None]]:
    names = [field.name for field in dataclasses.fields(Slice)]
    return {name: [getattr(one, name) for one in slices] for name in names}
