"""Runs the command that kills and restarts the server, while requests are under way. What is judged by it is elsewhere.

The command may end when the server is up, or stay in the foreground as the server itself; then it is left running.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from dataclasses import dataclass

from semel.verify.connection import Client
from semel.verify.model import Undecided

#: How long the command may take until the server is up again.
MAX_SECONDS = 60.0
#: A command that still runs after the server has answered for so long is the server.
FOREGROUND_SECONDS = 2.0
POLL_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Restarted:
    """The server was told to restart, and accepts connections again."""

    seconds: float


async def restart(client: Client, command: str) -> Restarted:
    """Run *command* in a shell, and wait until the server is up again."""
    began = time.monotonic()
    with tempfile.TemporaryFile() as output:
        process = await asyncio.create_subprocess_shell(
            command, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        up_since: float | None = None
        while time.monotonic() < began + MAX_SECONDS:
            if process.returncode:
                output.seek(0)
                said = output.read()[-200:].decode(errors="replace").split("\n")
                last = next((line.strip() for line in reversed(said) if line.strip()), "it printed nothing")
                raise Undecided(f"--restart-cmd ended with {process.returncode}: {last}")
            if not await client.is_up():
                up_since = None
            elif process.returncode == 0:
                return Restarted(time.monotonic() - began)
            else:
                up_since = up_since or time.monotonic()
                if time.monotonic() > up_since + FOREGROUND_SECONDS:
                    return Restarted(time.monotonic() - began)
            await asyncio.sleep(POLL_SECONDS)
    raise Undecided(f"The server was not up within {MAX_SECONDS:g} s of --restart-cmd.")
