"""`--watch` on lists: what is there is shown again and again, until Ctrl-C."""

import asyncio
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from semel.stores import store
from tests.cli.test_keys import claim
from tests.kit.carrier import Carrier

#: The program, as if it had been started by a person.
LISTENING = """
import signal
from semel.cli.main import main
signal.signal(signal.SIGINT, signal.default_int_handler)
main()
"""


def test_a_watched_list_as_json(environment: dict[str, str], tmp_path: Path, sqlite_url: str) -> None:
    """For programs a watched list is a JSON list on each line, with what has come since; Ctrl-C ends it well."""
    keys = store(sqlite_url)
    keys.migrate()
    watch = ("keys", "list", "--watch", "--json", "--store", sqlite_url)
    with _started(environment, tmp_path, *watch) as process:
        assert process.stdout is not None
        assert json.loads(next(process.stdout)) == []
        claim(keys, "pay-17")
        (found,) = json.loads(_until(process.stdout, "pay-17"))
    assert found["state"] == "processing"
    keys.close()


def test_a_watched_list_in_a_pipe(environment: dict[str, str], tmp_path: Path, postgres_url: str) -> None:
    """In a pipe one table follows another; while the store can't be reached, that is said, and the list goes on."""
    with Line(postgres_url) as line:
        watch = ("outbox", "list", "--watch", "--store", line.address(postgres_url))
        with _started(environment, tmp_path, *watch) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            assert next(process.stdout) == "No messages.\n"
            line.is_cut = True
            line.cut()
            assert next(process.stderr).startswith("The store can't be read now: ")
            line.is_cut = False
            _until(process.stdout, "No messages.")


def test_the_end_of_a_pipe(environment: dict[str, str], tmp_path: Path, sqlite_url: str) -> None:
    """When its reader has gone, a list ends without a word, as other programs do."""
    store(sqlite_url).migrate()
    command = f"{sys.executable} -m semel keys list --watch --store '{sqlite_url}' | head -1"
    ended = subprocess.run(["/bin/sh", "-c", command], env=environment, cwd=tmp_path, capture_output=True, check=True)
    assert (ended.stdout, ended.stderr) == (b"No keys.\n", b"")


def test_a_watched_list_on_a_terminal(environment: dict[str, str], tmp_path: Path, sqlite_url: str) -> None:
    """On a terminal the list is drawn anew on a screen of its own, and when it ends, the terminal is as before."""
    keys = store(sqlite_url)
    keys.migrate()
    terminal, end = pty.openpty()
    watch = ("keys", "list", "--watch", "--store", sqlite_url)
    with _started(environment | {"TERM": "xterm"}, tmp_path, *watch, terminal=end):
        os.close(end)
        shown = _shown_until(terminal, b"No keys.")
        claim(keys, "pay-17")
        shown += _shown_until(terminal, b"pay-17")
    with suppress(OSError):  # Linux: the last of those who had the terminal open has gone.
        while chunk := os.read(terminal, 4096):
            shown += chunk
    os.close(terminal)
    assert b"Ctrl-C ends it" in shown
    assert b"\x1b[?1049h" in shown
    assert shown.rindex(b"\x1b[?1049l") > shown.rindex(b"pay-17")
    assert b"Traceback" not in shown
    keys.close()


class Line(Carrier):
    """Carries everything, until it is cut."""

    is_cut = False

    async def carry(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        """Carry one connection; none while the line is cut."""
        if self.is_cut:
            to_client.close()
            return
        server, to_server = await asyncio.open_connection(*self.server)
        try:
            async with asyncio.TaskGroup() as ways:
                ways.create_task(_pass_on(client, to_server))
                ways.create_task(_pass_on(server, to_client))
        except* OSError:
            pass  # one side has closed
        finally:
            to_client.close()
            to_server.close()

    def cut(self) -> None:
        """End the connections that there are."""
        self._loop.call_soon_threadsafe(lambda: [link.cancel() for link in self._links])


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    raise ConnectionResetError


@contextmanager
def _started(
    environment: dict[str, str], tmp_path: Path, *arguments: str, terminal: int = subprocess.PIPE
) -> Iterator[subprocess.Popen[str]]:
    # Where a shell has started the tests in the background, its children ignore Ctrl-C.
    command = [sys.executable, "-c", LISTENING, *arguments]
    with subprocess.Popen(
        command, env=environment, cwd=tmp_path, text=True, stdin=subprocess.DEVNULL, stdout=terminal, stderr=terminal
    ) as process:
        try:
            yield process
            process.send_signal(signal.SIGINT)
            assert process.wait() == 0
        finally:
            process.kill()


def _until(lines: IO[str], what: str) -> str:
    """Read on until a line has *what* in it. A wait for what never comes, the test's time limit ends."""
    return next(line for line in lines if what in line)


def _shown_until(terminal: int, what: bytes) -> bytes:
    shown = b""
    while what not in shown:
        shown += os.read(terminal, 4096)
    return shown
