"""One process of the demo, which can be killed and started again. What it serves is the business of its module."""

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
#: While nobody serves, callers wait here. It must hold all who may call within the second that a start takes.
BACKLOG = 512

START_SECONDS = 20.0


class ChildDied(SemelError):
    """A process of the demo ended by itself."""


class Port:
    """A free port of this machine alone, held by the demo itself: it stays while those who serve it come and go."""

    def __init__(self) -> None:
        """Listen on it."""
        self.socket = socket.create_server((LOOPBACK, 0), backlog=BACKLOG)
        self.number: int = self.socket.getsockname()[1]

    @property
    def url(self) -> str:
        """Where to call."""
        return f"http://{LOOPBACK}:{self.number}"


class Child:
    """A program of this package that serves a port. It ends when we do, however we end."""

    def __init__(self, module: str, port: Port, arguments: Sequence[str], variables: dict[str, str], log: Path) -> None:
        """Nothing is started yet. What it complains of goes to *log*."""
        self._module = module
        self._port = port
        self._arguments = arguments
        # Where we found our modules it will find them too; the current folder is not looked into (-P).
        self._variables = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | variables
        self._log = log
        self._process: Process | None = None

    async def start(self) -> None:
        """Start it, and wait until it serves."""
        descriptor = self._port.socket.fileno()
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", self._module, str(descriptor), *self._arguments),
                stdin=PIPE,  # Never written to: its end is the child's sign that we are gone.
                stdout=PIPE,
                stderr=log,
                pass_fds=[descriptor],
                env=self._variables,
                start_new_session=True,  # Ctrl-C is for us; we end our children.
            )
        assert self._process.stdout is not None  # noqa: S101 - for mypy
        try:
            async with asyncio.timeout(START_SECONDS):
                said = await self._process.stdout.readline()
        except TimeoutError:
            said = b""
        if said.decode().strip() != READY:
            raise ChildDied(f"{self._module} did not start: {self._last_words()}")

    async def kill(self) -> None:
        """End it with SIGKILL: it writes nothing any more, and tells nobody."""
        process = self._process
        if process is None:
            return
        if process.returncode is not None:
            raise ChildDied(f"{self._module} ended by itself: {self._last_words()}")
        process.kill()
        await process.wait()
        self._process = None

    async def end(self) -> None:
        """End it, if it runs. It keeps nothing in memory that anybody needs."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), "it said nothing")
