"""The programs of the page on metrics and traces. Each is run in a process of its own: a sink is the process's."""

import subprocess
import sys
from pathlib import Path

from tests.docs.served import ROOT

EXAMPLES = ROOT / "docs/examples"


def run(code: str, folder: Path) -> str:
    ended = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(EXAMPLES)!r})\n{code}"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    return ended.stdout


def example(name: str) -> str:
    assert (EXAMPLES / f"{name}.py").exists()
    return name


def test_metrics(tmp_path: Path) -> None:
    """The app counts its requests at /metrics. Under gunicorn it is run by ``tests/ops``."""
    code = f"""
from {example("metrics_app")} import app
client = app.test_client()
for _ in range(2):
    assert client.post("/orders/3", headers={{"Idempotency-Key": "order-17"}}).status_code == 201
print(client.get("/metrics").text)
"""
    text = run(code, tmp_path)
    for outcome in ("ran", "replayed"):
        labels = f'door="flask",endpoint="POST /orders/<int:number>",outcome="{outcome}"'
        assert f"semel_requests_total{{{labels}}} 1.0" in text


def test_gunicorns_configuration(tmp_path: Path) -> None:
    """The configuration has the hook that gunicorn calls when a worker has ended."""
    name = example("gunicorn_metrics")
    code = f"import {name} as c; print(c.workers, callable(c.child_exit))"
    assert run(code, tmp_path) == "2 True\n"


def test_a_sink(tmp_path: Path) -> None:
    """A function is told of what it looks for, and of everything else."""
    code = f"""
import {example("own_sink")}
from semel.core.events import NotStored, TookOver
from semel.telemetry.stream import tell
tell(NotStored("29ed32ec70d4", 1, "disk full"))
tell(TookOver("29ed32ec70d4", 2))
"""
    assert run(code, tmp_path) == "The answer of 29ed32ec70d4 could not be stored: disk full\n"
