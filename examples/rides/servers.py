"""The two servers of the story, each in its own process on this machine. They end with the ``with`` block.

The provider is never killed: it stands for a service of another company.
"""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

from examples.rides.provider import LOOPBACK

ROOT = Path(__file__).parents[2]
START_SECONDS = 60.0
POLL_SECONDS = 0.05


@contextmanager
def provider() -> Iterator[httpx.Client]:
    """Run a provider during the block; yield a client of it."""
    command = [sys.executable, "-m", "examples.rides.provider"]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        stdin=subprocess.PIPE,  # Never written to: when it closes, the provider knows that this process has ended.
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C reaches this process only, which then ends it.
    ) as process:
        assert process.stdout is not None  # noqa: S101 - for mypy
        try:
            with httpx.Client(base_url=process.stdout.readline().strip()) as client:
                yield client
        finally:
            process.kill()


class App:
    """The API under uvicorn, which can be killed and started again."""

    def __init__(self, store: str, provider: str, log: Path) -> None:
        """Start nothing yet. Its output goes to *log*."""
        self.log = log
        self._port = _free_port()
        self._variables = os.environ | {"RIDES_STORE": store, "RIDES_PROVIDER": provider}
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"http://{LOOPBACK}:{self._port}"

    def start(self) -> None:
        """Start it, and wait until it answers."""
        command = [sys.executable, "-m", "uvicorn", "--factory", "examples.rides.app:make_app"]
        options = ["--port", str(self._port), "--log-level", "error"]
        with self.log.open("a") as log:
            self._process = subprocess.Popen([*command, *options], cwd=ROOT, env=self._variables, stderr=log)
        deadline = time.monotonic() + START_SECONDS
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"The API did not start.\n{self.log.read_text()}")
            time.sleep(POLL_SECONDS)

    def kill(self) -> None:
        """``kill -9``: it gets no chance to write or to say anything."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _answers(self) -> bool:
        with suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/rides").is_success
        return False


@contextmanager
def app(store: str, provider: str, log: Path) -> Iterator[App]:
    """Run the API during the block."""
    api = App(store, provider, log)
    try:
        api.start()
        yield api
    finally:
        api.kill()


def _free_port() -> int:
    with socket.create_server((LOOPBACK, 0)) as server:
        return int(server.getsockname()[1])
