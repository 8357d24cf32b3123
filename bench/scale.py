"""How one PostgreSQL serves several worker processes: ``python -m bench scale``. First executions, each with a new key.

It counts what the processes of the application and of PostgreSQL ran for, what PostgreSQL's sessions waited for, and
how many connections there were. All of it, and what sends the load, shares the cores of this machine.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any
from urllib.request import urlopen

import psycopg
from starlette.types import ASGIApp

from bench import cpu, wrk
from bench.app import app
from bench.databases import DURABLE
from bench.load import LOOPBACK, ROOT, Load, LoadFailed, send
from bench.setup import Place, Setup
from bench.table import aligned
from semel.stores import store
from tests.kit import servers
from tests.kit.servers.base import free_port

PROCESSES = (1, 2, 4, 8)
CONNECTIONS, WARM_SECONDS, SECONDS = 64, 2, 6
#: Tells the workers what to serve.
SETUP = "SEMEL_BENCH_SETUP"
_SAMPLE_SECONDS = 0.02
_PATIENCE_SECONDS = 60

_WAITS = """
SELECT coalesce(wait_event_type || ': ' || wait_event, CASE state WHEN 'active' THEN 'running' ELSE 'idle' END)
  FROM pg_stat_activity
 WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()
"""
_IDLE = "Client: ClientRead"


@dataclass(frozen=True)
class Scaled:
    """One number of worker processes."""

    processes: int
    per_second: float
    p50_ms: float
    p99_ms: float
    #: Microseconds of processor time a request: of the workers, of PostgreSQL's sessions, of its writers.
    server_us: float
    postgres_us: float
    writers_us: float
    #: Of the store, in all processes together; and in one.
    connections: int
    connections_each: float
    #: What part of the time sessions had something to do, and waited for it or ran: by what.
    waits: dict[str, float]
    others_cores: float


def served() -> ASGIApp:
    """Build the app of one worker."""
    return app(Setup.from_json(os.environ[SETUP]))


def measure_scale(processes: Sequence[int] = PROCESSES, options: str = "") -> list[Scaled]:
    """Serve with each number of processes; *options* go into the store's URL, such as ``connections=2``."""
    found = []
    with servers.postgres(settings=DURABLE) as server:
        keys = store(server.url)
        keys.migrate()
        keys.close()
        place = Place(f"{server.url}?{options}" if options else server.url)
        for count in processes:
            with _workers(Setup(place), count) as (pid, port):
                found.append(_measured(server, pid, port, count))
    return found


def _measured(server: Any, pid: int, port: int, count: int) -> Scaled:
    sender = send if wrk.version() is None else wrk.send
    sender(Load(port, CONNECTIONS, WARM_SECONDS))
    machine, workers, database = cpu.Machine.now(), dict(cpu.family(pid)), _processor_time(server)
    with _sampled(server.url) as sampled:
        outcome = sender(Load(port, CONNECTIONS, SECONDS))
    spent = cpu.between(workers, dict(cpu.family(pid)))
    after = _processor_time(server)
    others = cpu.Machine.now().others_since(machine)
    with psycopg.connect(server.url, autocommit=True) as connection:
        asked = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'semel'"
        [(connections,)] = connection.execute(asked).fetchall()
    microseconds = 1e6 / outcome.requests
    return Scaled(
        processes=count,
        per_second=outcome.per_second,
        p50_ms=outcome.p50_ms,
        p99_ms=outcome.p99_ms,
        server_us=spent * microseconds,
        postgres_us=cpu.between(database.backends, after.backends) * microseconds,
        writers_us=cpu.between(database.writers, after.writers) * microseconds,
        connections=connections,
        connections_each=connections / count,
        waits=_shares(sampled),
        others_cores=others,
    )


def _processor_time(server: Any) -> cpu.Postgres:
    return cpu.Postgres.of(server.pid, "semel")


@contextmanager
def _sampled(url: str) -> Iterator[Counter[str]]:
    """Look again and again what the sessions wait for, inside the block."""
    seen: Counter[str] = Counter()
    is_over = threading.Event()

    def look() -> None:
        with psycopg.connect(url, autocommit=True) as connection:
            while not is_over.wait(_SAMPLE_SECONDS):
                seen.update(what for (what,) in connection.execute(_WAITS))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        is_over.set()
        thread.join()


def _shares(seen: Counter[str]) -> dict[str, float]:
    busy = {what: count for what, count in seen.items() if what not in {_IDLE, "idle"}}
    total = sum(busy.values())
    return {what: count / total for what, count in Counter(busy).most_common(5)}


@contextmanager
def _workers(setup: Setup, count: int) -> Iterator[tuple[int, int]]:
    """Serve with so many processes of Uvicorn on one port; yield the first process, and the port."""
    port = free_port()
    words = ["-m", "uvicorn", "--factory", "bench.scale:served", "--host", LOOPBACK, "--port", str(port)]
    how = [
        "--workers",
        str(count),
        "--loop",
        "uvloop",
        "--http",
        "httptools",
        "--no-access-log",
        "--log-level",
        "error",
    ]
    environment = os.environ | {SETUP: setup.as_json()}
    process = subprocess.Popen([sys.executable, *words, *how], cwd=ROOT, env=environment)
    try:
        _until_up(port, process)
        yield process.pid, port
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(_PATIENCE_SECONDS)


def _until_up(port: int, process: subprocess.Popen[bytes]) -> None:
    ends = time.monotonic() + _PATIENCE_SECONDS
    while time.monotonic() < ends and process.poll() is None:
        with suppress(OSError):
            urlopen(f"http://{LOOPBACK}:{port}/facts").close()
            return
        time.sleep(_SAMPLE_SECONDS)
    raise LoadFailed("The workers did not start. See above what they wrote.")


def listed(found: list[Scaled]) -> str:
    """Say it in a table."""
    head = ("processes", "req/s", "p50 ms", "p99 ms", "app us", "PG us", "writers us", "connections", "others")
    rows: list[tuple[str, ...]] = [head]
    rows += [
        (
            str(each.processes),
            f"{each.per_second:.0f}",
            f"{each.p50_ms:.1f}",
            f"{each.p99_ms:.1f}",
            f"{each.server_us:.0f}",
            f"{each.postgres_us:.0f}",
            f"{each.writers_us:.0f}",
            f"{each.connections} ({each.connections_each:.1f} each)",
            f"{each.others_cores:.2f}",
        )
        for each in found
    ]
    waits = [
        f"{each.processes}: " + ", ".join(f"{what} {share:.0%}" for what, share in each.waits.items()) for each in found
    ]
    return "\n".join(
        [
            *aligned(rows),
            "",
            "us: microseconds of processor time a request. others: cores that other programs had.",
            "what PostgreSQL's sessions did while they had a statement, by samples:",
            *waits,
        ]
    )


def as_json(found: list[Scaled]) -> str:
    """Say it for programs."""
    return json.dumps([asdict(each) for each in found], indent=2)
