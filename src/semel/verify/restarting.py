"""Runs the command that kills and restarts the server, while requests are under way. What is judged by it is elsewhere.

The command may end when the server is up, or stay in the foreground as the server itself; then it is left running.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import IO

from semel.verify.connection import Client
from semel.verify.message import Answer, Request
from semel.verify.model import Undecided

#: How long the command may take until the server is up again.
MAX_SECONDS = 60.0
#: A command that still runs after the server has answered for so long is the server.
FOREGROUND_SECONDS = 2.0
POLL_SECONDS = 0.02
#: What a gateway answers by itself while its server is away.
_GATEWAYS_OWN = frozenset({502, 503, 504})
#: Bytes of its output that are looked at, if it fails.
MAX_OUTPUT = 200


@dataclass(frozen=True, slots=True)
class Restarted:
    """The server was told to restart, and accepts connections again."""

    seconds: float


async def restart(client: Client, command: str, *, probe: Request | None = None) -> Restarted:
    """Run *command* in a shell, and wait until the server is up again. Behind a gateway, which goes on, it is up when
    it answers *probe* itself; whether it was down is not seen.
    """
    if probe is not None:
        return await _restart(command, lambda: _is_served(client, probe), lambda: True)
    witness = await client.opened()
    try:
        return await _restart(command, client.is_up, lambda: witness is None or witness.is_closed)
    finally:
        if witness is not None:
            witness.abort()


async def _is_served(client: Client, probe: Request) -> bool:
    outcome = await client.send(probe)
    return isinstance(outcome, Answer) and outcome.status not in _GATEWAYS_OWN


async def _restart(
    command: str, ask_if_up: Callable[[], Awaitable[bool]], is_witness_gone: Callable[[], bool]
) -> Restarted:
    """Do so. The witness is a connection that was open before: one that stays open has not seen a restart."""
    began = time.monotonic()
    is_restarted, up_since = False, began
    with tempfile.TemporaryFile() as output:
        process = await asyncio.create_subprocess_shell(
            command, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        while time.monotonic() < began + MAX_SECONDS:
            status = process.returncode  # Before the server is asked: what was up before the command ended may be gone.
            if status:
                raise Undecided(f"--restart-cmd ended with {status}: {_last_line(output)}")
            is_up = await ask_if_up()
            if not is_up or (is_witness_gone() and not is_restarted):
                is_restarted, up_since = True, time.monotonic()
            has_been_up = is_up and time.monotonic() > up_since + FOREGROUND_SECONDS
            if is_up and is_restarted and (status == 0 or has_been_up):
                return Restarted(time.monotonic() - began)
            if status == 0 and has_been_up:
                raise Undecided(
                    "--restart-cmd has ended, and a connection stayed open: the server was not restarted. One behind a "
                    "gateway needs --behind-gateway."
                )
            await asyncio.sleep(POLL_SECONDS)
    raise Undecided(f"The server was not up within {MAX_SECONDS:g} s of --restart-cmd.")


def _last_line(output: IO[bytes]) -> str:
    output.seek(0)
    said = output.read()[-MAX_OUTPUT:].decode(errors="replace").splitlines()
    return next((line.strip() for line in reversed(said) if line.strip()), "it printed nothing")
