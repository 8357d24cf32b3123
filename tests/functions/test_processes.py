"""Real processes: killed in mid-function, forked, ended; and a worker of Celery's."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery.contrib.testing.worker import start_worker
from celery.signals import setup_logging

from semel.errors import ConfigurationError
from semel.functions import idempotent
from tests.functions import program

ROOT = Path(__file__).parents[2]
HANG_SECONDS = 60


class Worker:
    """Runs the program in processes of its own."""

    def __init__(self, folder: Path, store: str) -> None:
        self._folder = folder
        self._environment = {
            **os.environ,
            "SEMEL_STORE": store,
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *sys.path]),
        }

    def run(self, *arguments: str, options: tuple[str, ...] = ()) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, *options, "-m", "tests.functions.program", str(self._folder), *arguments]
        return subprocess.run(
            command,
            cwd=ROOT,
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=HANG_SECONDS,
        )

    @property
    def effects(self) -> list[str]:
        return (self._folder / "effects").read_text().split()


@pytest.fixture
def worker(tmp_path: Path, durable_url: str) -> Worker:
    return Worker(tmp_path, durable_url)


@pytest.mark.slow
@pytest.mark.parametrize(
    "task, said, effects",
    [
        # What happened outside, before the process died, happens again: only its author can know of it.
        ("send", "sent at attempt 2", ["sent", "sent"]),
        ("send_async", "sent at attempt 2", ["sent", "sent"]),
        ("send_carefully", "OutcomeUnknown", ["sent"]),
        # What is in a step is not repeated.
        ("book", "booked at attempt 2", ["reserved", "charged"]),
        ("once", "2026-11", ["imported", "imported"]),
    ],
)
def test_a_worker_that_is_killed(task: str, said: str, effects: list[str], worker: Worker) -> None:
    """A task whose worker is killed is taken up when it is delivered again, once its lease has ended, as its settings
    say; and then it is done.
    """
    assert worker.run(task, "die").returncode == -signal.SIGKILL
    assert worker.effects == effects[:1]
    again = worker.run(task)
    assert json.loads(again.stdout) == [said, said], again.stderr
    assert worker.effects == effects


@pytest.mark.parametrize("task", ["send_carefully", "send_async", "once"])
def test_a_process_ends_quietly(task: str, worker: Worker) -> None:
    """A script that opens a store by its URL and never closes it ends without a warning."""
    ended = worker.run(task, options=("-W", "always::ResourceWarning"))
    assert (ended.returncode, ended.stderr) == (0, "")
    assert len(worker.effects) == 1


def test_fork(worker: Worker) -> None:
    """A function that was called before a fork can be called after it, and its keys are the same."""
    ended = worker.run("send_carefully", "fork")
    assert json.loads(ended.stdout) == ["sent"] * 3, ended.stderr
    assert worker.effects == ["sent"] * 2


@pytest.fixture
def logging_as_it_is() -> Iterator[None]:
    """A worker of Celery's sets up the process's logging, for good, unless somebody says that they do."""

    def leave_it(**_: object) -> None:
        pass

    setup_logging.connect(leave_it)
    yield
    setup_logging.disconnect(leave_it)


@pytest.mark.usefixtures("logging_as_it_is")
def test_a_worker_of_celery(tmp_path: Path, sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task that is delivered twice is done once, and both deliveries have its result."""
    monkeypatch.setenv("SEMEL_STORE", sqlite_url)
    monkeypatch.setattr(program.stage, "folder", tmp_path)
    with start_worker(program.app, pool="solo", perform_ping_check=False, shutdown_timeout=HANG_SECONDS):
        results = [program.send.delay(7), program.send.delay(7)]
        said = [result.get(timeout=HANG_SECONDS) for result in results]
    assert said == ["sent at attempt 1"] * 2
    assert (tmp_path / "effects").read_text() == "sent\n"


def test_the_environment_names_the_store(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without store=, SEMEL_STORE says where keys are kept, when the function is called; without either, it is said."""

    @idempotent(key="number", name="send")
    def send(number: int) -> Any:
        return number

    monkeypatch.delenv("SEMEL_STORE", raising=False)
    with pytest.raises(ConfigurationError, match=r"Which store\? Give store=, .* or set SEMEL_STORE"):
        send(1)
    monkeypatch.setenv("SEMEL_STORE", sqlite_url)
    assert send(1) == 1
    assert Path(sqlite_url.removeprefix("sqlite:///")).exists()
