"""The web servers that are measured: each a process of its own, up for the whole run and loaded in turn."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.request import Request, urlopen

from bench.load import LOOPBACK, ROOT, LoadFailed
from bench.setup import Setup

#: What is under way is finished first, and written.
END_SECONDS = 30
#: A server that does not come to it within this time is broken.
PATIENCE_SECONDS = 60
POLL_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Facts:
    """What a server says of itself."""

    ran: int
    cpu_seconds: float
    #: How many duplicates wait for the first.
    waiting: int = 0


class WebServer:
    """The app under its server. It ends with this process, however that ends."""

    def __init__(self, setup: Setup, profile: Path | None = None) -> None:
        options = ["--profile", str(profile)] if profile else []
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.server", setup.as_json(), *options],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        port = self._process.stdout.readline() if self._process.stdout else ""
        if not port:
            raise LoadFailed(f"The server of {setup} did not start. See above what it wrote.")
        self.port = int(port)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self._process.communicate(timeout=END_SECONDS)

    @property
    def pid(self) -> int:
        """The id of its process."""
        return self._process.pid

    def facts(self) -> Facts:
        """Ask how often the handler ran, and how much work the process did."""
        with urlopen(f"http://{LOOPBACK}:{self.port}/facts") as answer:
            return Facts(**json.load(answer))

    def until(self, what: str, is_so: Callable[[Facts], bool]) -> Facts:
        """Ask until it is so."""
        ends = time.monotonic() + PATIENCE_SECONDS
        while not is_so(facts := self.facts()):
            if time.monotonic() > ends:
                raise LoadFailed(f"{what}: never; the server says {facts}.")
            time.sleep(POLL_SECONDS)
        return facts

    def release(self) -> None:
        """Let the handlers that are held go on."""
        urlopen(Request(f"http://{LOOPBACK}:{self.port}/release", method="PUT")).close()

    def kill(self) -> None:
        """Kill the process, which has no time for a last word."""
        self._process.kill()
        self._process.wait()

    def memory_mb(self) -> float:
        """How much memory the process has in use (RSS)."""
        status = Path(f"/proc/{self._process.pid}/status")
        if status.exists():
            line = next(line for line in status.read_text().splitlines() if line.startswith("VmRSS:"))
            return int(line.split()[1]) / 1024
        said = subprocess.run(["/bin/ps", "-o", "rss=", "-p", str(self._process.pid)], capture_output=True, check=True)
        return int(said.stdout) / 1024
