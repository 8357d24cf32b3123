"""A server that is killed in the middle of requests, by the command that is given for it."""

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from semel.verify.model import Verdict
from tests.kit.servers import free_port
from tests.proxy.kit import proxied
from tests.verify.asking import told, verdicts, verified

PROGRAM = Path(__file__).with_name("mortal.py")
CHECKS = ("restart-keeps-answers", "kill-in-flight", "other-body-after-crash")

Start = Callable[[str], tuple[str, str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a server in a mode, and return its URL and the command that kills and restarts it."""
    pid = tmp_path / "pid"

    def begin(mode: str) -> tuple[str, str]:
        port = free_port()
        words = [sys.executable, "-S", str(PROGRAM), mode, str(tmp_path), str(port)]
        command = f"{shlex.join(words)} & echo $! > {pid}"
        subprocess.run(["/bin/sh", "-c", command], check=True)
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.01)
        return f"http://127.0.0.1:{port}", f"kill -9 $(cat {pid}); {command}"

    yield begin
    if pid.exists():
        with suppress(ProcessLookupError):
            os.kill(int(pid.read_text()), signal.SIGKILL)


async def test_a_server_that_recovers(start: Start) -> None:
    """Where the effect and its record are one commit, nothing is found, whatever moment the server dies in."""
    url, command = start("correct")
    report = await verified(url, *CHECKS, count="/#$", restart_cmd=command, other=())
    assert verdicts(report) == dict.fromkeys(CHECKS, "pass"), report.findings


@pytest.mark.parametrize(
    "mode, check",
    [
        ("409-for-ever", "kill-in-flight"),
        ("effect-before-record", "kill-in-flight"),
        ("keys-in-memory", "restart-keeps-answers"),
        ("another-body-takes-over", "other-body-after-crash"),
    ],
)
async def test_a_server_that_does_not(start: Start, mode: str, check: str) -> None:
    """A key that stays in progress for ever, an effect that is repeated, and keys that are forgotten are found."""
    url, command = start(mode)
    report = await verified(url, check, count="/#$", restart_cmd=command, other=(), recovery=1.0)
    assert verdicts(report) == {check: "fail"}, report.findings


async def test_a_server_behind_a_gateway(start: Start, tmp_path: Path) -> None:
    """Behind a gateway, which stays up, the crash of its server is judged by what becomes of the requests."""
    url, command = start("keys-ignored")
    (tmp_path / "proxy").mkdir()
    async with proxied(tmp_path / "proxy", upstream=url, scope="header:X-Account") as world:
        given: dict[str, Any] = {"count": f"{url}/#$", "restart_cmd": command, "other": ()}
        for behind, verdict in ((True, "pass"), (False, "inconclusive")):
            report = await verified(f"http://127.0.0.1:{world.port}", *CHECKS, is_behind_gateway=behind, **given)
            seen = verdicts(report)
            assert {name: seen[name] for name in CHECKS} == dict.fromkeys(CHECKS, verdict), report.findings


async def test_a_crash_that_met_no_request(start: Start, tmp_path: Path) -> None:
    """Requests that a gateway refused while its server was away were not under way: nothing is shown by them."""
    url, _ = start("correct")
    away = shlex.quote(str(tmp_path / "away"))
    command = f"touch {away}; while [ -e {away} ]; do sleep 0.01; done"
    given: dict[str, Any] = {"count": "/#$", "restart_cmd": command, "other": ()}
    report = await verified(url, "kill-in-flight", is_behind_gateway=True, **given)
    assert "No request was under way" in told(report, Verdict.INCONCLUSIVE)["kill-in-flight"]


@pytest.mark.parametrize(
    "command, reason",
    [("echo no such service >&2; exit 3", "3: no such service"), ("true", "the server was not restarted")],
)
async def test_a_command_that_restarts_nothing(start: Start, command: str, reason: str) -> None:
    """A command that fails, or does nothing, decides nothing, and that is told."""
    url, _ = start("correct")
    report = await verified(url, "restart-keeps-answers", count="/#$", restart_cmd=command, other=())
    assert reason in told(report, Verdict.INCONCLUSIVE)["restart-keeps-answers"]
