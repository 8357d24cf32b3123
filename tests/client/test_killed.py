"""kill -9 of a client at every executed line of its journal and its transport, against a guarded API: each intent takes
effect once, under one key, and the next process gets its answer.
"""

import json
import os
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from semel.client import Journal
from tests.client.dying import LEASE
from tests.client.served import Served

ROOT = Path(__file__).parents[2]
#: The first line, and how many lines on is the next: together every line. ``make test`` takes a sample.
PARTS = 6
WALKS = [
    pytest.param((1, 29), id="sample"),
    *(pytest.param((n, PARTS), marks=pytest.mark.slow, id=f"part {n} of {PARTS}") for n in range(1, PARTS + 1)),
]
#: Of both versions of httpx one is enough: no line of ours is different.
WALKED = ("httpx2", "async httpx2", "requests")


class Processes:
    """Processes that send, each of them new."""

    def __init__(self, server: Served, folder: Path) -> None:
        self._url = f"{server.url}/pay"
        self._folder = folder
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
        self._parent = subprocess.Popen(
            [sys.executable, "-m", "tests.client.dying"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment,
        )

    def run(self, kind: str, intent: str, line: int = 0, *, resumes: bool = False) -> tuple[int, Any]:
        job = {
            "kind": kind,
            "intent": intent,
            "line": line,
            "resumes": resumes,
            "url": self._url,
            "journal": str(self.journal(intent)),
        }
        assert self._parent.stdin is not None
        assert self._parent.stdout is not None
        print(json.dumps(job), file=self._parent.stdin, flush=True)
        told = json.loads(self._parent.stdout.readline())
        return told["exit"], told["said"]

    def journal(self, intent: str) -> Path:
        """Each intent has a file, so that making the file is part of what is killed."""
        return self._folder / f"{intent}.journal"

    def close(self) -> None:
        self._parent.communicate()


@pytest.fixture
def processes(server: Served, tmp_path: Path) -> Iterator[Processes]:
    processes = Processes(server, tmp_path)
    yield processes
    processes.close()


def keys_of(server: Served) -> dict[bytes, set[str | None]]:
    keys = defaultdict(set)
    for seen in server.seen:
        keys[seen.body].add(seen.key)
    return keys


@pytest.mark.parametrize("walk", WALKS)
@pytest.mark.parametrize("kind", WALKED)
def test_killed_at_every_line(server: Served, processes: Processes, kind: str, walk: tuple[int, int]) -> None:
    """A client that is killed at any line leaves nothing, or an intent that the next one ends: one effect, one key."""
    ended, whole = processes.run(kind, "whole")
    assert (ended, whole["status"]) == (0, 201)
    assert whole["lines"] > 200
    reached, (first, stride) = 0, walk
    for line in range(first, whole["lines"] + 1, stride):
        intent = f"line {line}"
        ended, _ = processes.run(kind, intent, line)
        assert ended in {0, -signal.SIGKILL}
        reached += ended == -signal.SIGKILL
        ended, again = processes.run(kind, intent)
        assert (ended, again["status"]) == (0, 201), (line, again)
        with Journal(processes.journal(intent), lease=LEASE) as journal:
            assert [entry.state for entry in journal.entries()] == ["done"]
    # A trace of threads may count some lines more, or less.
    assert reached > whole["lines"] // stride // 2
    assert set(server.effects.values()) == {1}
    assert {len(keys) for keys in keys_of(server).values()} == {1}


@pytest.mark.parametrize("walk", WALKS)
@pytest.mark.parametrize("kind", ["httpx2", "requests"])
def test_killed_while_it_resumes(server: Served, processes: Processes, kind: str, walk: tuple[int, int]) -> None:
    """A process that is killed while it goes on after a crash leaves what the next one ends."""

    def crash(intent: str) -> None:
        """Leave an intent that was sent, and the answer lost with its process."""
        ended, whole = processes.run(kind, intent)
        assert ended == 0, whole
        with Journal(processes.journal(intent), lease=LEASE) as journal:
            opened = journal._connection.opened
            assert opened is not None
            body = json.dumps({"intent": intent}, separators=(",", ":") if kind == "httpx2" else (", ", ": "))
            opened.execute(
                "UPDATE semel_journal SET state = 'pending', status = NULL, answer = NULL, ended_at = NULL, body = ?,"
                """ headers = '[["content-type","application/json"]]'""",
                (body.encode(),),
            )

    crash("whole")
    ended, whole = processes.run(kind, "whole", resumes=True)
    assert (ended, whole["status"]) == (0, ["201"])
    first, stride = walk
    for line in range(first, whole["lines"] + 1, stride):
        intent = f"line {line}"
        crash(intent)
        processes.run(kind, intent, line, resumes=True)
        ended, again = processes.run(kind, intent, resumes=True)
        assert ended == 0
        assert again["status"] in ([], ["201"])
        with Journal(processes.journal(intent), lease=LEASE) as journal:
            assert [entry.state for entry in journal.entries()] == ["done"]
    assert set(server.effects.values()) == {1}
    assert {len(keys) for keys in keys_of(server).values()} == {1}
