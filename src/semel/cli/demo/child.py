"""One process of the demo, which can be killed and started again. What it serves is in its own module."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from pathlib import Path

from semel.cli.demo.serving import READY
from semel.errors import SemelError

LOOPBACK = "127.0.0.1"
#: While no worker accepts, connections wait here. It must hold all that arrive within the second that a start takes.
BACKLOG = 512

START_SECONDS = 20.0


class ChildDied(SemelError):
    """A process of the demo ended by itself."""


class Port:
    """A free loopback port, held open by the demo itself: it stays open while its workers are killed and started."""

    def __init__(self) -> None:
        """Listen on it."""
        self.socket = socket.create_server((LOOPBACK, 0), backlog=BACKLOG)
        self.number: int = self.socket.getsockname()[1]

    @property
    def url(self) -> str:
        """The URL of the port."""
        return f"http://{LOOPBACK}:{self.number}"


class Child:
    """A program of this package that serves a port. It ends when the demo ends, even by kill -9."""

    def __init__(self, module: str, port: Port, arguments: Sequence[str], variables: dict[str, str], log: Path) -> None:
        """Start nothing yet. Its stderr goes to *log*."""
        self._module = module
        self._port = port
        self._arguments = arguments
        # It imports from the same folders as this process, without the current folder (-P).
        self._variables = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | variables
        self._log = log
        self._process: Process | None = None

    async def start(self) -> None:
        """Start it, and wait until it serves."""
        descriptor = self._port.socket.fileno()
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", self._module, str(descriptor), *self._arguments),
                stdin=PIPE,  # Never written to: when it closes, the child knows that this process has ended.
                stdout=PIPE,
                stderr=log,
                pass_fds=[descriptor],
                env=self._variables,
                start_new_session=True,  # Ctrl-C reaches this process only, which then ends its children.
            )
        assert self._process.stdout is not None  # noqa: S101 - for mypy
        try:
            async with asyncio.timeout(START_SECONDS):
                said = await self._process.stdout.readline()
        except TimeoutError:
            said = b""
        if said.decode().strip() != READY:
            raise ChildDied(f"{self._module} did not start: {self._last_line()}")

    async def kill(self) -> None:
        """End it with SIGKILL: it gets no chance to write or to say anything."""
        process = self._process
        if process is None:
            return
        if process.returncode is not None:
            raise ChildDied(f"{self._module} ended by itself: {self._last_line()}")
        process.kill()
        await process.wait()
        self._process = None

    async def end(self) -> None:
        """End it, if it runs. It has nothing in memory that must be saved."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    def _last_line(self) -> str:
        lines = self._log.read_text(errors="replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), "it printed nothing")
