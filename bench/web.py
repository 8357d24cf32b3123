"""The web servers that are measured: each a process of its own, up for the whole run and loaded in turn."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.request import urlopen

from bench.cases import Work
from bench.load import LOOPBACK, ROOT

#: What is under way is finished first, and written.
END_SECONDS = 30


@dataclass(frozen=True, slots=True)
class Facts:
    """What a server says of itself."""

    ran: int
    cpu_seconds: float


class WebServer:
    """The app under its server. It ends with this process, however that ends."""

    def __init__(
        self,
        store: str | None,
        work: Work = "nothing",
        database: str | None = None,
        profile: Path | None = None,
        framework: str = "Starlette",
    ) -> None:
        options = {"--store": store, "--work": work, "--database": database, "--profile": profile}
        options |= {"--framework": framework}
        words = [str(word) for option in options.items() if option[1] for word in option]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.server", *words],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.port = int(self._process.stdout.readline()) if self._process.stdout else 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self._process.communicate(timeout=END_SECONDS)

    def facts(self) -> Facts:
        """Ask how often the handler ran, and how much work the process did."""
        with urlopen(f"http://{LOOPBACK}:{self.port}/facts") as answer:
            return Facts(**json.load(answer))

    def memory_mb(self) -> float:
        """How much memory the process has in use (RSS)."""
        status = Path(f"/proc/{self._process.pid}/status")
        if status.exists():
            line = next(line for line in status.read_text().splitlines() if line.startswith("VmRSS:"))
            return int(line.split()[1]) / 1024
        said = subprocess.run(["/bin/ps", "-o", "rss=", "-p", str(self._process.pid)], capture_output=True, check=True)
        return int(said.stdout) / 1024
