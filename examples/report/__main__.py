"""The story: a report is ordered, its worker is killed (``kill -9``) half-way, and another finishes it.

    python -m examples.report [--seconds 10]

It ends with a count of what was written: each section once, by whichever worker.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import uuid4

import httpx

from examples.report.app import SECTIONS
from examples.report.client import Bar, State, order

ROOT = Path(__file__).parents[2]
LOOPBACK = "127.0.0.1"
START_SECONDS = 60.0
POLL_SECONDS = 0.05
#: Half-way: some sections are written, and one is being written.
KILL_AT = 0.4


class House:
    """The API and its workers, each a process of its own on this machine."""

    def __init__(self, folder: Path, seconds: float) -> None:
        store = f"sqlite:///{folder}/report.db"
        self._variables = os.environ | {"REPORT_STORE": store, "REPORT_SECONDS": str(seconds)}
        self.log = folder / "log"
        self._port = _free_port()
        self.url = f"http://{LOOPBACK}:{self._port}"
        self._workers: list[subprocess.Popen[bytes]] = []

    def start_api(self, stack: ExitStack) -> None:
        """Start the API, and wait until it answers."""
        options = ("--port", str(self._port), "--log-level", "error")
        api = self._start("uvicorn", "examples.report.app:app", *options)
        stack.callback(api.wait)
        stack.callback(api.kill)
        deadline = time.monotonic() + START_SECONDS
        while not self._answers():
            if api.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"The API did not start.\n{self.log.read_text()}")
            time.sleep(POLL_SECONDS)

    def start_worker(self, stack: ExitStack) -> int:
        """Start a worker; return its process id."""
        worker = self._start("semel", "work", "--app", "examples.report.app:app")
        stack.callback(worker.wait)
        stack.callback(worker.kill)
        self._workers.append(worker)
        return worker.pid

    def kill_worker(self) -> int:
        """``kill -9`` the worker: it gets no chance to write or to say anything."""
        worker = self._workers[-1]
        worker.kill()
        worker.wait()
        return worker.pid

    def _start(self, *command: str) -> "subprocess.Popen[bytes]":
        with self.log.open("a") as log:
            # In a session of its own: Ctrl-C is for us, and we end it.
            return subprocess.Popen(
                [sys.executable, "-m", *command],
                cwd=ROOT,
                env=self._variables,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _answers(self) -> bool:
        with suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/sections").is_success
        return False


class Story:
    """One report, from its order to its end."""

    def __init__(self, house: House, stack: ExitStack) -> None:
        self._house = house
        self._stack = stack
        self._bar = Bar()
        self._was_killed = False

    def tell(self, client: httpx.Client) -> int:
        """Order it, and count what came of it; 0 when all is as it should be."""
        key = str(uuid4())
        print(f"An API on {self._house.url}, and a worker: process {self._house.start_worker(self._stack)}.")
        answer = order(client, key, "November", self._see)
        self._bar.draw({"state": "complete", "progress": 1.0, "note": None})
        self._bar.end()
        print(f"\n{answer.status_code} {answer.text}")
        again = client.post("/reports", json={"month": "November"}, headers={"Idempotency-Key": key})
        print(f"The same order again: {again.status_code}, and nothing is written: it is a replay.")
        written = Counter(title for _, title, _ in client.get("/sections").json())
        workers = {process for _, _, process in client.get("/sections").json()}
        print(f"{written.total()} sections were written, each once, by {len(workers)} workers.")
        faults = [
            answer.status_code != httpx.codes.CREATED,
            again.headers.get("idempotent-replayed") != "true",
            written != Counter(SECTIONS),
            not self._was_killed,
        ]
        return int(any(faults))

    def _see(self, state: State) -> None:
        self._bar.draw(state)
        if not self._was_killed and (state["progress"] or 0) >= KILL_AT:
            self._was_killed = True
            self._bar.end()
            killed, successor = self._house.kill_worker(), self._house.start_worker(self._stack)
            print(f"kill -9 {killed}: its lease runs out, and process {successor} goes on.")


def main() -> int:
    """Tell the story."""
    parser = argparse.ArgumentParser(description="A long report, and a worker that is killed.")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long a report takes")
    seconds: float = parser.parse_args().seconds
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the processes are ended too
    with TemporaryDirectory(prefix="report-") as folder, ExitStack() as stack:
        house = House(Path(folder), seconds)
        house.start_api(stack)
        client = stack.enter_context(httpx.Client(base_url=house.url, headers={"X-User": "Ada"}))
        faults = Story(house, stack).tell(client)
        if faults:
            print(f"Something is not as it should be. The log of the processes:\n{house.log.read_text()}")
    return faults


def _free_port() -> int:
    with socket.create_server((LOOPBACK, 0)) as server:
        return int(server.getsockname()[1])


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
