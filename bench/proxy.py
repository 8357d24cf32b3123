"""What the proxy costs: pass-through, first executions and replays, against its bare upstream and against the same app
with the middleware inside. The guard itself is measured elsewhere.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench import cpu
from bench.load import KEY_DIGITS, LOOPBACK, ROOT, Load, LoadFailed, send
from bench.setup import Place, Setup
from bench.web import WebServer

#: Requests of one row; enough for seconds of load.
REQUESTS = 4000
WARM_UP = 400
CONNECTIONS = 64
#: Keys that are replayed, round and round.
KEYS = 200
#: Milliseconds of the proxy's own processor time for a request that it only passes on.
GOAL_MS = 0.3

#: The load has a key in every request: what is not guarded is what no pattern fits.
_UNGUARDED = ("--path", "/none")
_END_SECONDS = 30


@dataclass(frozen=True, slots=True)
class ProxyFact:
    """One row."""

    name: str
    per_second: float
    p50_ms: float
    #: Of the process that the client speaks to, for each request.
    cpu_ms: float


def measure_proxy() -> list[ProxyFact]:
    """Measure every row, one after the other."""
    with tempfile.TemporaryDirectory() as folder, WebServer(Setup()) as bare:
        place = Place(f"sqlite:///{folder}/inside.db")
        with WebServer(Setup(place=place)) as inside:
            facts = [_fact("bare upstream", bare.port, bare.pid), _fact("middleware inside", inside.port, inside.pid)]
        keys = Path(folder) / "keys"
        keys.write_text("\n".join(secrets.token_hex(KEY_DIGITS // 2) for _ in range(KEYS)))
        with _proxy(bare.port, f"sqlite:///{folder}/proxy.db", *_UNGUARDED) as (port, pid):
            facts.append(_fact("proxy, pass-through", port, pid))
        with _proxy(bare.port, f"sqlite:///{folder}/proxy.db") as (port, pid):
            facts.append(_fact("proxy, first", port, pid))
            facts.append(_fact("proxy, replay", port, pid, str(keys)))
        return facts


def _fact(name: str, port: int, pid: int, keys: str | None = None) -> ProxyFact:
    if keys is not None:
        # One after the other: at once, a duplicate could meet its own first execution, which is 409.
        send(Load(port, 1, requests=KEYS, keys=keys))
    send(Load(port, CONNECTIONS, requests=WARM_UP, keys=keys))
    before = cpu.spent(pid)
    outcome = send(Load(port, CONNECTIONS, requests=REQUESTS, keys=keys))
    spent = cpu.spent(pid) - before
    return ProxyFact(name, outcome.per_second, outcome.p50_ms, spent / REQUESTS * 1000)


@contextmanager
def _proxy(upstream: int, store: str, *options: str) -> Iterator[tuple[int, int]]:
    command = [
        *(sys.executable, "-m", "semel", "proxy", "--scope", "single", "--listen", f"{LOOPBACK}:0"),
        *("--upstream", f"http://{LOOPBACK}:{upstream}", "--store", store, *options),
    ]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline() if process.stdout else ""
        if not line:
            raise LoadFailed("The proxy did not start. See above what it wrote.")
        yield int(line.partition(",")[0].rpartition(":")[2]), process.pid
    finally:
        process.terminate()
        process.communicate(timeout=_END_SECONDS)


def listed(facts: list[ProxyFact]) -> str:
    """Show the rows."""
    bare = facts[0]
    lines = [f"{'':22}{'requests/s':>12}{'of bare':>9}{'p50 ms':>9}{'CPU ms':>9}"]
    for each in facts:
        share = each.per_second / bare.per_second
        lines.append(f"{each.name:22}{each.per_second:12.0f}{share:9.2f}{each.p50_ms:9.1f}{each.cpu_ms:9.3f}")
    lines.append(f"Goal: a request that is only passed on costs the proxy {GOAL_MS} ms of processor time at most.")
    return "\n".join(lines)


def as_json(facts: list[ProxyFact]) -> str:
    """Write the rows as JSON."""
    return json.dumps([dataclasses.asdict(each) for each in facts], indent=2)
