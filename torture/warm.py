"""A warm process that forks a child for every job: ``Warm`` is its owner's side, ``main`` its own.

Forking is done by a separate process with one thread: a fork with more threads is unsafe, and a test runner
has the threads that its tests leave behind.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import traceback
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from torture.job import Ended, Job
from torture.provider import ROOT

#: A report is a few hundred bytes; a pipe holds at least this many without a reader.
_REPORT_BYTES = 4096


class ChildFailed(RuntimeError):
    """A child ended in a way that no fault explains. The message ends with what it wrote."""


class Warm:
    """Children on demand. Every one of them is ended with it."""

    def __init__(self, folder: Path) -> None:
        """Keep what the children write to their standard error in *folder*."""
        self._log = folder / "children.log"

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", "torture.warm"]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate()

    def start(self, job: Job) -> int:
        """Begin *job*; return the child's process id."""
        return int(self._ask(f"start {job.as_json()}")["pid"])

    def wait(self, pid: int) -> Ended:
        """Wait until a child has ended, or is stopped."""
        ended = Ended(**self._ask(f"wait {pid}"))
        if ended.exit_code or ended.killed_by not in {None, signal.SIGKILL, signal.SIGTERM}:
            tail = self._log.read_text(errors="replace")[-3000:]
            raise ChildFailed(f"A child ended with {ended.exit_code or ended.killed_by}:\n{tail}")
        return ended

    def run(self, job: Job) -> Ended:
        """Do *job*, and wait for its end."""
        return self.wait(self.start(job))

    def go_on(self, pid: int) -> Ended:
        """Continue a stopped child, and wait for its end."""
        os.kill(pid, signal.SIGCONT)
        return self.wait(pid)

    def _ask(self, line: str) -> dict[str, Any]:
        to, back = self._process.stdin, self._process.stdout
        if to is None or back is None:
            raise AssertionError
        to.write(line.encode() + b"\n")
        to.flush()
        answer = back.readline()
        if not answer:
            raise ChildFailed(f"The warm process ended:\n{self._log.read_text(errors='replace')[-3000:]}")
        read: dict[str, Any] = json.loads(answer)
        return read


def main() -> None:
    """Fork children until the input ends, then end those that are left."""
    from torture import child  # noqa: PLC0415 - the owner's side has no need of Semel

    child.warm_up()
    # A child's garbage collector would write to every shared page, and so copy each.
    gc.collect()
    gc.freeze()
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    reports: dict[int, int] = {}
    for line in sys.stdin:
        what, _, argument = line.partition(" ")
        answer = _start(argument, reports, answers) if what == "start" else asdict(_wait(int(argument), reports))
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()
    for pid in reports:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _start(argument: str, reports: dict[int, int], answers: IO[bytes]) -> dict[str, Any]:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # The jobs are the parent's to read.
        _be_a_child(Job.from_json(argument), writing, answers)
    os.close(writing)
    reports[pid] = reading
    return {"pid": pid}


def _be_a_child(job: Job, writing: int, answers: IO[bytes]) -> None:
    from torture import child  # noqa: PLC0415 - as above

    code = 1
    try:
        os.close(answers.fileno())
        signal.alarm(job.patience_seconds)
        os.write(writing, json.dumps(child.work(job)).encode())
        code = 0
    except BaseException:  # noqa: BLE001 - whatever it was, a child must not become a second parent
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _wait(pid: int, reports: dict[int, int]) -> Ended:
    _, status = os.waitpid(pid, os.WUNTRACED)
    if os.WIFSTOPPED(status):
        return Ended(pid, stopped_by=os.WSTOPSIG(status))
    reading = reports.pop(pid)
    said = os.read(reading, _REPORT_BYTES)
    os.close(reading)
    if os.WIFSIGNALED(status):
        return Ended(pid, killed_by=os.WTERMSIG(status))
    return Ended(pid, exit_code=os.WEXITSTATUS(status), said=json.loads(said or b"{}"))


if __name__ == "__main__":
    main()
