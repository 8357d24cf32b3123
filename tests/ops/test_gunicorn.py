"""Metrics of several processes, under a real gunicorn."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

import httpx
import pytest

from semel.core.commands import ReadCounts
from semel.stores import store
from tests.kit import servers

EXAMPLES = Path(__file__).parents[2] / "docs/examples"
WORKERS = 2
PATIENCE = 60.0

pytestmark = pytest.mark.slow


@contextmanager
def gunicorn(folder: Path, *more: str) -> Iterator[httpx.Client]:
    """The app of the page, with two workers."""
    url, shared = f"sqlite:///{folder}/shop.db", folder / "metrics"
    with store(url) as keys:
        keys.migrate()
    shared.mkdir()
    port = servers.free_port()
    command = [sys.executable, "-m", "gunicorn", "--config", str(EXAMPLES / "gunicorn_metrics.py"), *more]
    command += ["--bind", f"127.0.0.1:{port}", "--chdir", str(EXAMPLES), "metrics_app:app"]
    settings = {"SEMEL_STORE": url, "PROMETHEUS_MULTIPROC_DIR": str(shared), "PYTHONDONTWRITEBYTECODE": "1"}
    with subprocess.Popen(command, env={**os.environ, **settings}) as child:
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE) as client:
                _until(lambda: _is_up(client))
                yield client
        finally:
            child.send_signal(signal.SIGTERM)


def _is_up(client: httpx.Client) -> bool:
    with suppress(httpx.TransportError):
        return client.get("/metrics").status_code == 200
    return False


def _until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def paid(client: httpx.Client) -> None:
    # A connection of its own, so that any worker may get it.
    answer = client.post("/orders/3", headers={"Idempotency-Key": str(uuid4()), "Connection": "close"})
    assert answer.status_code == 201


def counted(client: httpx.Client) -> int:
    text = client.get("/metrics", headers={"Connection": "close"}).text
    found = re.search(r'semel_requests_total\{[^}]*outcome="ran"[^}]*\} (\S+)', text)
    return int(float(found[1])) if found else 0


@pytest.mark.parametrize("more", [(), ("--preload",)], ids=["", "preload"])
def test_workers_are_added_up(tmp_path: Path, more: tuple[str, ...]) -> None:
    """Whichever worker is scraped, it shows what all have counted; a worker that is killed takes nothing away."""
    with gunicorn(tmp_path, *more) as client:
        sent = 0

        def both_have_served() -> bool:
            nonlocal sent
            paid(client)
            sent += 1
            return len(_serving(tmp_path)) >= WORKERS

        _until(both_have_served)
        assert {counted(client) for _ in range(10)} == {sent}
        os.kill(min(_serving(tmp_path)), signal.SIGKILL)
        for _ in range(5):
            with suppress(httpx.TransportError):
                paid(client)
        assert counted(client) >= sent


@pytest.mark.parametrize("more", [(), ("--preload",), ("--threads", "2")], ids=["", "preload", "threads"])
def test_what_was_counted_is_added_at_the_end(tmp_path: Path, more: tuple[str, ...]) -> None:
    """A server that is told to stop has added how all of its requests ended to the store's counts."""
    with gunicorn(tmp_path, *more) as client:
        for _ in range(10):
            paid(client)
    with store(f"sqlite:///{tmp_path}/shop.db") as keys:
        assert sum(number for _, outcome, number in keys.perform(ReadCounts(60)).counts if outcome == "ran") == 10


def _serving(folder: Path) -> set[int]:
    """The workers that have counted a request: each has a file of its own."""
    files = (folder / "metrics").glob("counter_*.db")
    return {int(each.stem.rpartition("_")[2]) for each in files if b"/orders/" in each.read_bytes()}
