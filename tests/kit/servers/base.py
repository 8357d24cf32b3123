"""What every test server has: a folder, a port on loopback, and a process that can be killed and started again. It
knows nothing of what they serve.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType

from semel.testing.process import POLL_SECONDS, START_SECONDS, Process, ServerDidNotStart, servers_account

LOOPBACK = "127.0.0.1"

# Below the ports that Linux and macOS give to outgoing connections. From among those, a client that retries while the
# server is down can be given the server's own port, connect to itself, and keep the server from coming back.
PORTS = range(20_000, 32_768)

NO_SETTINGS: Mapping[str, str] = MappingProxyType({})


class ServerNotOurs(RuntimeError):
    """This server was named by a URL in the environment: it can't be stopped or started from here."""


class Server:
    """What all servers have in common: they can be killed, and started again on the same port and data."""

    def __init__(self, url: str, process: Process | None) -> None:
        self.url = url
        self._process = process

    @property
    def pid(self) -> int:
        """The process id: another one after each start."""
        return self._ours.pid

    def start(self) -> None:
        """Start it again after `stop` or `kill`, and wait until it takes connections."""
        self._ours.start()

    def kill(self) -> None:
        """End it with SIGKILL: nothing is written any more and no client is told."""
        self._ours.end(signal.SIGKILL)

    @property
    def _ours(self) -> Process:
        if self._process is None:
            raise ServerNotOurs(ServerNotOurs.__doc__)
        return self._process


@contextmanager
def own_folder() -> Iterator[Path]:
    """Lend a folder that belongs to whoever runs the servers. A server's own guard removes it where we can't."""
    folder = Path(tempfile.mkdtemp(prefix="semel-"))
    try:
        give(folder)
        yield folder
    finally:
        shutil.rmtree(folder)


def give(path: Path) -> None:
    """Make *path* belong to whoever runs the servers."""
    if account := servers_account():
        os.chown(path, account.pw_uid, account.pw_gid, follow_symlinks=False)


def free_port(*, also: int = 0) -> int:
    """Return a port that nobody listens on; `also` is how far above it a second one is, free and within `PORTS` too."""
    while True:
        port = secrets.choice(PORTS[: len(PORTS) - also])
        with suppress(OSError), socket.socket() as first, socket.socket() as second:
            first.bind((LOOPBACK, port))
            if also:
                second.bind((LOOPBACK, port + also))
            return port


def until(what: str, is_so: Callable[[], bool], seconds: float = START_SECONDS) -> None:
    """Wait until several servers agree on something that takes them a moment."""
    deadline = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > deadline:
            raise ServerDidNotStart(f"After {seconds:.0f} s it is still not so that {what}.")
        time.sleep(POLL_SECONDS)
