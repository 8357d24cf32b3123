"""The measurements, in the order they are made. What they look like on a screen is for ``table``."""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench import cpu, load, wrk
from bench.cases import Case, Plan
from bench.databases import Databases, databases
from bench.load import KEY_DIGITS, ROOT, Load, LoadFailed, Sender
from bench.recovery import measure_recovery
from bench.report import Calls, Growth, Machine, Measured, Recovery, Report, Slice, Traffic, Waiting
from bench.setup import Setup
from bench.waiters import measure_waiting
from bench.web import WebServer
from bench.wire import Wire

#: Where a lone request reads or writes little, it takes many connections to see how much they share.
LOADED_FACTOR = 10


@dataclass(frozen=True, slots=True)
class Stand:
    """One case with its server up and its keys prepared."""

    case: Case
    setup: Setup
    server: WebServer
    keys: str | None

    def load(self, connections: int, *, seconds: float | None = None, requests: int | None = None) -> Load:
        """Say what to send to this server."""
        return Load(self.server.port, connections, seconds, requests, self.keys)

    def measure(self, bases: Databases, send: Sender, what: Load) -> Slice:
        """Send a load; return what came of it, and what it cost."""
        machine = cpu.Machine.now() if cpu.IS_KNOWN else None
        postgres = bases.processor_time() if cpu.IS_KNOWN and self.case.uses_postgres else None
        logged = bases.wal_bytes()
        before = self.server.facts()
        outcome = send(what)
        after = self.server.facts()
        ran = after.ran - before.ran
        # wrk leaves at the end of its time, and up to one request on each connection is not counted.
        expected = range(1) if self.keys else range(outcome.requests, outcome.requests + what.connections + 1)
        if ran not in expected:
            raise LoadFailed(f"{self.case.name}: the handler ran {ran} times for {outcome.requests} requests.")
        served = ran or outcome.requests
        seen = Slice(
            outcome.per_second,
            outcome.p50_ms,
            server_us=(after.cpu_seconds - before.cpu_seconds) / served * 1e6,
        )
        if self.case.uses_postgres:
            seen = dataclasses.replace(seen, wal_bytes=(bases.wal_bytes() - logged) / served)
        if postgres:
            now = bases.processor_time()
            seen = dataclasses.replace(
                seen,
                postgres_us=cpu.between(postgres.backends, now.backends) / served * 1e6,
                writers_us=cpu.between(postgres.writers, now.writers) / served * 1e6,
            )
        return dataclasses.replace(seen, others_cores=cpu.Machine.now().others_since(machine)) if machine else seen


def measure(plan: Plan) -> Report:
    """Measure everything that *plan* names."""
    version = wrk.version() if plan.sender != "own" else None
    if plan.sender == "wrk" and version is None:
        raise LoadFailed("wrk is not installed. Install it, or use --load own, which is part of the bench.")
    load_before = os.getloadavg()[0]
    with (
        cpu.cores_shared(wanted=plan.pins) as is_pinned,
        databases([case.store for case in plan.cases]) as bases,
    ):
        skipped = tuple(case for case in plan.cases if not bases.has(case.store))
        plan = dataclasses.replace(plan, cases=tuple(case for case in plan.cases if case not in skipped))
        # Now: a source that is committed or edited while the run goes on is not what it began with.
        machine = Machine.this(bases.versions, load_before, is_pinned=is_pinned)
        if skipped:
            _say(f"No redis-server here: {', '.join(case.name for case in skipped)} left out.")
        calls = _calls(plan)
        with _stands(plan, bases) as stands:
            loaded = _rounds(plan, bases, stands, wrk.send if version else load.send)
            alone = _rounds(_lone(plan), bases, stands, load.send)
            traffic = {stand.case: _traffic(plan, bases, stand) for stand in stands if stand.case.uses_postgres}
        # The servers have ended, and their connections have reported what they did.
        return Report(
            plan=plan,
            skipped=skipped,
            machine=machine,
            sender=version or "our own client",
            measured=tuple(
                Measured(
                    stand.case, loaded[stand.case], alone[stand.case], traffic.get(stand.case), _hot_share(bases, stand)
                )
                for stand in stands
            ),
            calls=calls,
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
            _say(f"{case.name}: starting")
            setup = fresh(case, bases)
            server = stack.enter_context(WebServer(setup))
            keys = used_keys(folder, plan, server) if case.replays else None
            stands.append(Stand(case, setup, server, keys))
            load.send(stands[-1].load(plan.connections, requests=warm_up_requests(case, plan)))
        yield stands


def warm_up_requests(case: Case, plan: Plan) -> int:
    """How many requests come before any that count: what is in front of a store has every key by then."""
    return max(plan.warm_up_requests, plan.replayed_keys if case.store == "tiered" else 0)


def fresh(case: Case, bases: Databases) -> Setup:
    """Make what a case needs: a store for its keys, and a database for its handler, which may be the same."""
    place = bases.new(case.store) if case.store else None
    database = (place or bases.new("PostgreSQL")).url if case.has_database else None
    return Setup(place, case.work, database, case.framework)


def used_keys(folder: Path, plan: Plan, server: WebServer) -> str:
    """Make keys, use each of them once, and return the file that they are in."""
    file = folder / f"{server.port}.keys"
    file.write_text("".join(f"{secrets.token_hex(KEY_DIGITS // 2)}\n" for _ in range(plan.replayed_keys)))
    load.send(Load(server.port, plan.connections, requests=plan.replayed_keys, keys=str(file)))
    return str(file)


def _lone(plan: Plan) -> Plan:
    return dataclasses.replace(plan, connections=1, seconds=plan.lone_seconds)


def _rounds(plan: Plan, bases: Databases, stands: list[Stand], send: Sender) -> dict[Case, tuple[Slice, ...]]:
    """Load each server in turn, several times over, so that a slow minute of the machine is every case's."""
    seen: dict[Case, list[Slice]] = {stand.case: [] for stand in stands}
    for number in range(1, plan.rounds + 1 if stands else 1):
        for stand in stands:
            seen[stand.case].append(stand.measure(bases, send, stand.load(plan.connections, seconds=plan.seconds)))
        rates = ", ".join(f"{case.name} {slices[-1].per_second:.0f}/s" for case, slices in seen.items())
        _say(f"round {number} of {plan.rounds}, connections {plan.connections}: {rates}")
    return {case: tuple(slices) for case, slices in seen.items()}


def _traffic(plan: Plan, bases: Databases, stand: Stand) -> Traffic:
    """Count what goes over the wire to PostgreSQL, from a second server on the same database."""
    setup = stand.setup
    number, many = plan.counted_requests, plan.counted_requests * LOADED_FACTOR
    with Wire(bases.postgres_url) as wire:
        place = setup.place and dataclasses.replace(setup.place, url=wire.address(setup.place.url))
        database = setup.database and wire.address(setup.database)
        with WebServer(dataclasses.replace(setup, place=place, database=database)) as server:
            # Every connection is opened, and every statement prepared.
            load.send(Load(server.port, plan.connections, requests=number, keys=stand.keys))
            load.send(Load(server.port, 1, requests=number, keys=stand.keys))
            before = wire.seen()
            load.send(Load(server.port, 1, requests=number, keys=stand.keys))
            between = wire.seen()
            load.send(Load(server.port, plan.connections, requests=many, keys=stand.keys))
            after = wire.seen()
    _say(f"{stand.case.name}: round trips counted")
    return Traffic(
        trips=(between.trips - before.trips) / number,
        statements=(between.statements - before.statements) / number,
        loaded_statements=(after.statements - between.statements) / many,
    )


def _hot_share(bases: Databases, stand: Stand) -> float | None:
    url = stand.setup.database or (stand.setup.place and stand.setup.place.url)
    return bases.hot_share(url) if url and stand.case.uses_postgres and not stand.case.replays else None


def _calls(plan: Plan) -> tuple[Calls, ...]:
    """Count calls in a process of its own: it is traced from its beginning to its end."""
    if "calls" not in plan.extras:
        return ()
    _say("calls: counting")
    command = [sys.executable, "-m", "bench", "calls", "--json"]
    ended = subprocess.run(command, stdout=subprocess.PIPE, cwd=ROOT, text=True, check=False)
    if ended.returncode:
        raise LoadFailed("The calls could not be counted. See above why, or leave them out by --only.")
    return tuple(Calls(**each) for each in json.loads(ended.stdout))


def _growth(plan: Plan, bases: Databases) -> tuple[Growth, ...]:
    """Give a new server many keys, and see what it holds on to."""
    grown = []
    for case in plan.cases if "memory" in plan.extras else ():
        if case.replays or case.has_database:
            continue
        with WebServer(fresh(case, bases)) as server:
            load.send(Load(server.port, plan.connections, requests=plan.warm_up_requests))
            before = server.memory_mb()
            load.send(Load(server.port, plan.connections, requests=plan.growth_keys))
            grown.append(Growth(case, before, server.memory_mb()))
        _say(f"memory: {case.name} done")
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
