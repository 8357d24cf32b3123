"""`semel demo`: real processes, real kills, and a referee who is himself put to the test."""

import io
import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from rich.console import Console

from semel.cli.demo.referee import Heard, Outcome, Referee
from semel.cli.demo.show import Show, Stage

Semel = Callable[..., subprocess.CompletedProcess[str]]


def figure(summary: str, name: str) -> int:
    found = re.search(rf"^{re.escape(name)} +([\d,]+)", summary, re.MULTILINE)
    assert found, f"{name!r} is not in:\n{summary}"
    return int(found[1].replace(",", ""))


def test_protected(semel: Semel) -> None:
    """Three seconds of storm and kills: every payment is charged once, and retries are replays."""
    ended = semel("demo", "--seconds", "3", "--seed", "once")
    summary = ended.stdout
    assert ended.returncode == 0, summary + ended.stderr
    assert figure(summary, "double charges") == 0
    assert figure(summary, "payments asked for") >= figure(summary, "charges made") >= figure(summary, "answered") > 0
    assert figure(summary, "workers killed (kill -9)") > 0
    assert figure(summary, "replays") > 0
    assert figure(summary, "take-overs") > 0
    assert 'semel.current().derive("charge")' in " ".join(summary.split())
    assert "seed once" in summary
    assert "\x1b" not in summary


def test_unprotected(semel: Semel) -> None:
    """The same storm without Semel charges some payments twice; as that is the point, it is no failure."""
    ended = semel("demo", "--seconds", "3", "--unprotected")
    assert ended.returncode == 0, ended.stderr
    assert figure(ended.stdout, "double charges") > 0
    assert figure(ended.stdout, "replays") == 0
    assert "✗" in ended.stdout


@pytest.mark.slow
def test_postgres(semel: Semel, empty_postgres_url: str) -> None:
    """The demo runs on a given store, which it migrates first."""
    ended = semel("demo", "--seconds", "3", "--store", empty_postgres_url)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert figure(ended.stdout, "double charges") == 0
    assert "201" in semel("keys", "list", "--store", empty_postgres_url).stdout


@pytest.fixture
def running(environment: dict[str, str], tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A demo in the middle of its storm."""
    command = [sys.executable, "-u", "-m", "semel", "demo", "--seconds", "60"]
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def read_until(pattern: str, process: subprocess.Popen[str]) -> re.Match[str]:
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.search(pattern, line):
            return found
    raise AssertionError(f"{pattern} was never printed")


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_interrupted(running: subprocess.Popen[str], number: signal.Signals, tmp_path: Path) -> None:
    """Ctrl-C ends the storm at once, with its summary, and leaves nothing behind."""
    read_until(r"replays [1-9]", running)
    running.send_signal(number)
    rest, _ = running.communicate(timeout=60)
    assert figure(rest, "double charges") == 0
    assert running.returncode == 0
    assert not list(tmp_path.iterdir())


def test_killed(running: subprocess.Popen[str]) -> None:
    """A demo that is killed takes its servers with it."""
    port = int(read_until(r"127\.0\.0\.1:(\d+)", running)[1])
    running.kill()
    running.wait()
    while is_served(port):
        pass  # One of the two workers has gone; the other may take a moment longer.


def is_served(port: int) -> bool:
    """Whether somebody takes a connection; if so, the answer comes when they have gone."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=60) as held, suppress(ConnectionResetError):
            held.recv(1)
    except ConnectionRefusedError:
        return False
    return True


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "charges.jsonl"


@pytest.fixture
def referee(log: Path) -> Referee:
    """A referee who expects one payment."""
    referee = Referee(log)
    referee.expect("order-1")
    return referee


def charge(log: Path, order: str, charge: str, *, is_new: bool = True) -> None:
    with log.open("a") as file:
        file.write(json.dumps({"order": order, "charge": charge, "is_new": is_new}) + "\n")


def paid(charge: str, receipt: str = "r-1") -> Heard:
    answer = json.dumps({"charge": charge, "receipt": receipt, "attempt": 1}).encode()
    return Heard("order-1", Outcome.PAID, answer)


def test_referee_content(referee: Referee, log: Path) -> None:
    """One charge, one answer however often, one call that the provider recognised: that is good."""
    charge(log, "order-1", "ch-1")
    charge(log, "order-1", "ch-1", is_new=False)
    referee.hear(paid("ch-1"))
    referee.hear(paid("ch-1"))
    referee.read_log()
    assert referee.verdict().is_good
    assert (referee.charges, referee.double_charges, referee.repeated_calls) == (1, 0, 1)


def test_referee_double(referee: Referee, log: Path) -> None:
    """A second charge for one order is found, whether or not anybody was told of it."""
    charge(log, "order-1", "ch-1")
    charge(log, "order-1", "ch-2")
    referee.hear(paid("ch-1"))
    referee.read_log()
    assert referee.verdict().doubled == {"order-1"}
    assert not referee.verdict().is_good


def test_referee_uncharged(referee: Referee, log: Path) -> None:
    """An answer that names a charge nobody made is found."""
    charge(log, "order-1", "ch-1")
    referee.hear(paid("ch-9"))
    referee.read_log()
    assert referee.verdict().uncharged == {"order-1"}
    assert not referee.verdict().is_good


def test_referee_contradicted(referee: Referee, log: Path) -> None:
    """Two answers to one payment that differ in a byte are found."""
    charge(log, "order-1", "ch-1")
    referee.hear(paid("ch-1", receipt="r-1"))
    referee.hear(paid("ch-1", receipt="r-2"))
    referee.read_log()
    assert referee.verdict().contradicted == {"order-1"}
    assert not referee.verdict().is_good


def test_referee_silence(referee: Referee) -> None:
    """A run in which no payment was answered proves nothing, and is no success."""
    referee.read_log()
    assert not referee.verdict().is_good


def test_referee_strangers(referee: Referee, log: Path) -> None:
    """Charges that a person made by hand are counted apart."""
    charge(log, "mine", "ch-1")
    charge(log, "mine", "ch-2")
    referee.read_log()
    assert (referee.charges, referee.other_charges) == (0, 2)
    assert not referee.verdict().doubled


def test_referee_half_a_line(referee: Referee, log: Path) -> None:
    """A line that the provider is still writing is read when it is whole."""
    log.write_text('{"order": "order-1", "cha')
    referee.read_log()
    assert referee.charges == 0
    log.write_text('{"order": "order-1", "charge": "ch-1", "is_new": true}\n')
    referee.read_log()
    assert referee.charges == 1


@pytest.mark.parametrize("width", [44, 60, 79, 80, 120])
def test_in_a_narrow_terminal(referee: Referee, width: int) -> None:
    """However narrow the terminal is, no figure of the moving table is cut, and no line is too long for it."""
    stage = Stage(referee, 20.0, "1", is_protected=True, kills=1234567, workers=[True, False])
    summary, moving = io.StringIO(), io.StringIO()
    Show(Console(width=200, file=summary, color_system=None)).summarise(stage, referee.verdict())
    counts = re.findall(r"^([a-z].*?) {2,}([\d,]+)(?: |$)", summary.getvalue(), re.MULTILINE)
    with Show(Console(width=width, file=moving, color_system=None, force_terminal=True)).watching(stage):
        pass
    shown = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", moving.getvalue()).replace("\r", "\n")
    assert "…" not in shown
    assert max(len(line.rstrip()) for line in shown.splitlines()) <= width
    assert ("workers killed (kill -9)", "1,234,567") in counts
    for name, number in counts:
        assert re.search(rf"{re.escape(name)} +{number}\b", shown), name
    assert "killed, starting again" in shown
