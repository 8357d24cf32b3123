"""Where a server spends its time under load, by cProfile. That makes calls dear: it ranks functions, no more."""

from __future__ import annotations

import pstats
import tempfile
from pathlib import Path

from bench import load
from bench.cases import Case, Plan
from bench.databases import databases
from bench.load import Load
from bench.measure import fresh, used_keys, warm_up_requests
from bench.web import WebServer

ROWS = 45

#: File, line, name.
_Function = tuple[str, int, str]
#: Calls that are no recursion, all calls, seconds in the function, seconds with what it calls, callers.
_Times = tuple[int, int, float, float, object]


def profile(case: Case, *, seconds: float) -> str:
    """Load the server of *case* for a while, and list the functions it spent its time in, in microseconds a request."""
    plan = Plan(cases=(case,))
    with (
        tempfile.TemporaryDirectory(prefix="semel-bench-") as folder,
        databases([case.store]) as bases,
    ):
        setup = fresh(case, bases)
        keys = None
        if case.replays:
            with WebServer(setup) as other:
                keys = used_keys(Path(folder), plan, other)
        file = Path(folder, "profile")
        with WebServer(setup, file) as server:
            before = warm_up_requests(case, plan)
            load.send(Load(server.port, plan.connections, requests=before, keys=keys))
            outcome = load.send(Load(server.port, plan.connections, seconds=seconds, keys=keys))
        return _listed(file, outcome.requests + before)


def _listed(file: Path, requests: int) -> str:
    measured: dict[_Function, _Times] = pstats.Stats(str(file)).stats  # type: ignore[attr-defined]  # typeshed omits it
    rows = sorted(measured.items(), key=lambda row: -row[1][2])[:ROWS]
    lines = [f"{'own us':>8}{'with calls':>12}{'calls':>8}   of one request, over {requests}"]
    for (source, line, name), (_, calls, own, whole, _) in rows:
        each = f"{own / requests * 1e6:>8.1f}{whole / requests * 1e6:>12.1f}{calls / requests:>8.2f}"
        lines.append(f"{each}   {'/'.join(Path(source).parts[-2:])}:{line} {name}")
    return "\n".join(lines)
