"""Programs that run as a user other than root, and servers that end with the process that started them. It knows
nothing of what they serve, and changes nothing outside its folder.
"""

import os
import pwd
import select
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

START_SECONDS = 60.0  # A start takes less than one second; recovery after kill() on a busy disk takes longer.
STOP_SECONDS = 30.0  # A fast stop writes a checkpoint first.
POLL_SECONDS = 0.01

# Runs next to a server. Standard input closes when the process that started it has ended, even by kill -9; then the
# server is ended, too. Standard error is a pipe of the server: it closes when the last of its processes has ended.
GUARD = 'read -r _; kill -s "$1" "$2"; cat <&2 >/dev/null; rm -rf "$3"'

Command = Sequence[str | Path]


class ServerDidNotStart(RuntimeError):
    """A program failed, or a server stayed silent instead of becoming ready. The message ends with what it wrote."""


class Process:
    """A server process with every process that it starts. `ready` is called with the process id; `abandon` is the
    signal for a server that is not needed any more.
    """

    def __init__(self, command: Command, folder: Path, ready: Callable[[int], bool], abandon: signal.Signals) -> None:
        self._command = command
        self._folder = folder
        self._ready = ready
        self._abandon = abandon

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.end(self._abandon)

    @property
    def pid(self) -> int:
        """The process id: another one after each start."""
        return self._child.pid

    def start(self) -> None:
        """Start it and wait until it is ready."""
        # The server and its children inherit the writing end and write nothing: end of file means that all have ended.
        self._lifeline, held = os.pipe()
        log = self._folder / "log"
        with log.open("wb") as output:
            self._child = spawn(self._command, self._folder, stdout=output, stderr=output, pass_fds=[held])
        os.close(held)
        guard: Command = ["/bin/sh", "-c", GUARD, "guard", self._abandon.name[3:], str(self.pid), self._folder]
        self._guard = spawn(guard, self._folder, stdin=subprocess.PIPE, stderr=self._lifeline)
        deadline = time.monotonic() + START_SECONDS
        while not self._ready(self.pid):
            if self._child.poll() is not None or time.monotonic() > deadline:
                self.end(signal.SIGKILL)
                raise ServerDidNotStart(f"{self._command[0]} is not ready:\n{log.read_text(errors='replace')}")
            time.sleep(POLL_SECONDS)

    def end(self, how: signal.Signals) -> None:
        """Send one signal and wait until every process of the server has ended. Harmless if they have ended already."""
        if self._guard.returncode is not None:
            return
        self._guard.kill()
        self._guard.communicate()
        self._child.send_signal(how)
        ended = select.poll()
        ended.register(self._lifeline, select.POLLIN)
        if not ended.poll(STOP_SECONDS * 1000):
            self._child.kill()
        self._child.wait()
        os.close(self._lifeline)


def servers_account() -> pwd.struct_passwd | None:
    """The account of the servers, if it is not this process's own: PostgreSQL refuses to run as root."""
    return pwd.getpwnam("nobody") if os.geteuid() == 0 else None


def run(command: Command, folder: Path) -> str:
    """Run a program to its end and return what it wrote."""
    with spawn(command, folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as child:
        output = child.communicate()[0].decode(errors="replace")
    if child.returncode:
        raise ServerDidNotStart(f"{command[0]} failed:\n{output}")
    return output


def spawn(
    command: Command,
    folder: Path,
    *,
    stdin: int = subprocess.DEVNULL,
    stdout: int | IO[bytes] = subprocess.DEVNULL,
    stderr: int | IO[bytes] = subprocess.DEVNULL,
    pass_fds: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Start a program in `folder`, as the servers' account."""
    account = servers_account()
    return subprocess.Popen(
        command,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        pass_fds=pass_fds,
        cwd=folder,
        env={"PATH": os.defpath, "HOME": str(folder), "LC_ALL": "C"},  # PGPORT and the like would change the server.
        user=account and account.pw_uid,
        group=account and account.pw_gid,
        extra_groups=account and [],
        start_new_session=True,  # Ctrl-C is for the tests; they end their servers in good order.
    )
