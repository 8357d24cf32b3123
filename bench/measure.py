"""The measurements, in the order they are made. What they look like on a screen is for ``report``."""

from __future__ import annotations

import dataclasses
import os
import secrets
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench import load, wrk
from bench.cases import IN_POSTGRES, Case, Plan
from bench.databases import Databases, databases, wait_for_reports
from bench.load import KEY_DIGITS, Load, LoadFailed, Outcome, Sender
from bench.recovery import measure_recovery
from bench.report import Growth, Latency, Machine, Recovery, Report, Throughput, Waiting
from bench.setup import Setup
from bench.waiters import measure_waiting
from bench.web import WebServer

#: More than one, and all count: a pass may tidy pages after a write, or meet what a server logs of its own accord.
WAL_PASSES = 5


@dataclass(frozen=True, slots=True)
class Stand:
    """One case with its server up and its keys prepared."""

    case: Case
    server: WebServer
    #: The URL of its store, or of what is behind it.
    store: str | None
    keys: str | None

    def load(self, connections: int, *, seconds: float | None = None, requests: int | None = None) -> Load:
        """Say what to send to this server."""
        return Load(self.server.port, connections, seconds, requests, self.keys)

    def run(self, send: Sender, what: Load) -> tuple[Outcome, float]:
        """Send a load; return what came of it, and the seconds of CPU that the server spent on it."""
        before = self.server.facts()
        outcome = send(what)
        after = self.server.facts()
        ran = after.ran - before.ran
        # wrk leaves at the end of its time, and up to one request on each connection is not counted.
        expected = range(1) if self.keys else range(outcome.requests, outcome.requests + what.connections + 1)
        if ran not in expected:
            raise LoadFailed(f"{self.case.title}: the handler ran {ran} times for {outcome.requests} requests.")
        return outcome, after.cpu_seconds - before.cpu_seconds


def measure(plan: Plan) -> Report:
    """Measure everything that *plan* names."""
    version = wrk.version() if plan.sender != "own" else None
    if plan.sender == "wrk" and version is None:
        raise LoadFailed("wrk is not installed.")
    load_average = os.getloadavg()[0]
    with databases([case.store for case in plan.cases]) as bases:
        skipped = tuple(case for case in plan.cases if not bases.has(case.store))
        plan = dataclasses.replace(plan, cases=tuple(case for case in plan.cases if case not in skipped))
        if skipped:
            _say(f"No redis-server here: {', '.join(case.name for case in skipped)} left out.")
        with _stands(plan, bases) as stands:
            throughput = _throughput(plan, stands, wrk.send if version else load.send)
            latency = _latency(plan, stands, bases)
            replays, writes = _wal(plan, stands, bases), _wal_of_writes(plan, stands, bases)
        # The servers have ended: what comes now is measured by itself.
        return Report(
            plan=plan,
            skipped=skipped,
            machine=Machine.this(bases.versions, load_average),
            sender=version or "our own client",
            throughput=throughput,
            latency=latency,
            wal_bytes_per_replay=replays,
            wal_bytes_per_write=writes,
            growth=_growth(plan, bases),
            waiting=_waiting(plan, bases),
            recovery=_recovery(plan, bases),
        )


@contextmanager
def _stands(plan: Plan, bases: Databases) -> Iterator[list[Stand]]:
    """Start a server for every case. One that is idle costs nothing."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="semel-bench-")))
        stands = []
        for case in plan.cases:
            _say(f"{case.title}: starting")
            setup = fresh(case, bases)
            server = stack.enter_context(WebServer(setup))
            keys = used_keys(folder, plan, server) if case.replays else None
            stands.append(Stand(case, server, setup.place.url if setup.place else None, keys))
            load.send(stands[-1].load(plan.connections, requests=warm_up_requests(case, plan)))
        yield stands


def warm_up_requests(case: Case, plan: Plan) -> int:
    """How many requests come before any that count: what is in front of a store has every key by then."""
    return max(plan.warm_up_requests, plan.replayed_keys if case.replays else 0)


def fresh(case: Case, bases: Databases) -> Setup:
    """Make what a case needs: a store for its keys, and a database for its handler, which may be the same."""
    place = bases.new(case.store) if case.store else None
    database = (place or bases.new("PostgreSQL")).url if case.writes else None
    return Setup(place, case.work, database, case.framework)


def used_keys(folder: Path, plan: Plan, server: WebServer) -> str:
    """Make keys, use each of them once, and return the file that they are in."""
    file = folder / f"{server.port}.keys"
    file.write_text("".join(f"{secrets.token_hex(KEY_DIGITS // 2)}\n" for _ in range(plan.replayed_keys)))
    load.send(Load(server.port, plan.connections, requests=plan.replayed_keys, keys=str(file)))
    return str(file)


def _throughput(plan: Plan, stands: list[Stand], send: Sender) -> tuple[Throughput, ...]:
    """Load each server in turn, several times over, so that a slow minute of the machine is everybody's."""
    rates: dict[Case, list[float]] = {case: [] for case in plan.cases}
    spent: dict[Case, list[float]] = {case: [] for case in plan.cases}
    for number in range(1, plan.rounds + 1 if stands else 1):
        for stand in stands:
            outcome, cpu_seconds = stand.run(send, stand.load(plan.connections, seconds=plan.seconds))
            rates[stand.case].append(outcome.per_second)
            spent[stand.case].append(cpu_seconds / outcome.requests)
        _say(f"round {number} of {plan.rounds}: " + ", ".join(f"{case.name} {rates[case][-1]:.0f}/s" for case in rates))
    by_name = {case.name: tuple(rates[case]) for case in plan.cases}
    return tuple(
        Throughput(case, by_name[case.name], tuple(spent[case]), by_name[case.baseline]) for case in plan.cases
    )


def _latency(plan: Plan, stands: list[Stand], bases: Databases) -> tuple[Latency, ...]:
    """Send requests one by one, again in turn, then count the statements that one takes."""
    took: dict[Case, list[float]] = {case: [] for case in plan.cases}
    for _ in range(plan.rounds):
        for stand in stands:
            outcome, _ = stand.run(load.send, stand.load(1, seconds=plan.seconds))
            took[stand.case].append(outcome.p50_ms)
    if stands:
        _say("latency: done")
    return tuple(Latency(stand.case, tuple(took[stand.case]), _statements(plan, stand, bases)) for stand in stands)


def _statements(plan: Plan, stand: Stand, bases: Databases) -> float | None:
    """Count statements per request by PostgreSQL's own book, in which each of ours is a transaction."""
    # A handler that writes does so over connections of its own, which report at other times.
    if stand.case.store not in IN_POSTGRES or stand.store is None or stand.case.writes:
        return None
    seen: list[int] = []
    for _ in range(2):
        if seen:
            load.send(stand.load(1, requests=plan.counted_requests))
        wait_for_reports()
        # A new key goes over every connection that the server has, and makes each report.
        load.send(Load(stand.server.port, 1, requests=1))
        seen.append(bases.transactions(stand.store))
    last_report = 2
    return (seen[1] - seen[0] - last_report) / plan.counted_requests


def _wal(plan: Plan, stands: list[Stand], bases: Databases) -> tuple[float, ...]:
    """Replay every key on a quiet server, and see how much it has logged."""
    stand = next((each for each in stands if each.case.store == "PostgreSQL" and each.case.replays), None)
    if stand is None:
        return ()
    logged = []
    for _ in range(WAL_PASSES):
        before = bases.wal_bytes()
        stand.run(load.send, stand.load(plan.connections, requests=plan.replayed_keys))
        logged.append((bases.wal_bytes() - before) / plan.replayed_keys)
    return tuple(logged)


def _wal_of_writes(plan: Plan, stands: list[Stand], bases: Databases) -> tuple[tuple[Case, float], ...]:
    """Send new keys to each server whose handler writes, and see how much is logged for each."""
    logged = []
    for stand in stands:
        if stand.case.writes:
            before = bases.wal_bytes()
            stand.run(load.send, stand.load(plan.connections, requests=plan.replayed_keys))
            logged.append((stand.case, (bases.wal_bytes() - before) / plan.replayed_keys))
    return tuple(logged)


def _growth(plan: Plan, bases: Databases) -> tuple[Growth, ...]:
    """Give a new server many keys, and see what it holds on to."""
    grown = []
    for case in plan.cases:
        if case.replays or case.writes:
            continue
        with WebServer(fresh(case, bases)) as server:
            load.send(Load(server.port, plan.connections, requests=plan.warm_up_requests))
            before = server.memory_mb()
            load.send(Load(server.port, plan.connections, requests=plan.growth_keys))
            grown.append(Growth(case, before, server.memory_mb()))
        _say(f"growth: {case.title} done")
    return tuple(grown)


def _waiting(plan: Plan, bases: Databases) -> Waiting | None:
    if "waiters" not in plan.extras:
        return None
    _say(f"{plan.waiters} waiters: starting")
    return measure_waiting(plan, bases)


def _recovery(plan: Plan, bases: Databases) -> tuple[Recovery, ...]:
    if "recovery" not in plan.extras:
        return ()
    _say("recovery: starting")
    return measure_recovery(plan, bases)


def _say(progress: str) -> None:
    print(progress, file=sys.stderr, flush=True)
