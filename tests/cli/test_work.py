"""`semel sweep`, `semel reap` and `semel work`."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import pytest

from semel.core.commands import Browse, Claim, Complete, Note, ReadTrail
from semel.core.message import Answer
from semel.core.record import NO_TOKEN, Hold
from semel.core.state import Event, State
from semel.errors import ConfigurationError
from semel.stores import Store, store
from semel.work.plan import duration
from tests.cli.test_keys import in_a_terminal

Semel = Callable[..., subprocess.CompletedProcess[str]]

DAY, LONG, OVER = timedelta(days=1), timedelta(hours=1), timedelta(microseconds=1)


@pytest.fixture(params=["sqlite_url", "postgres_url"])
def url(request: pytest.FixtureRequest) -> str:
    """A store with a stuck key, one that may not run again, one that has expired, and one in flight."""
    found: str = request.getfixturevalue(request.param)
    with closing(store(found)) as keys:
        keys.migrate()
        keys.perform(Claim("acme", "stuck", os.urandom(16), b"", OVER, DAY))
        keys.perform(Claim("acme", "opaque", os.urandom(16), b"", OVER, DAY, on_crash="refuse"))
        keys.perform(Claim("acme", "running", os.urandom(16), b"", LONG, OVER))
        hold = keys.perform(Claim("acme", "expired", os.urandom(16), b"", LONG, OVER))
        assert isinstance(hold, Hold)
        keys.perform(Complete(hold, Event.COMPLETE, Answer(201)))
    return found


def states(keys: Store) -> dict[str, State]:
    return {record.key: record.state for record in keys.perform(Browse(limit=100))}


def test_sweep(semel: Semel, url: str, keys: Store) -> None:
    """`semel sweep` sweeps once, and says in one line what came of it."""
    ended = semel("sweep", "--store", url)
    assert ended.returncode == 0
    assert ended.stdout == "swept: 1 freed, 1 parked, 0 left to the completer\n"
    assert states(keys)["opaque"] is State.UNKNOWN
    assert next(each for each in keys.perform(Browse(limit=9)) if each.key == "stuck").token == NO_TOKEN
    again = json.loads(semel("sweep", "--store", url, "--json").stdout)
    assert again == {"freed": 0, "parked": 0, "left": 0, "error": None}


def test_reap(semel: Semel, url: str, keys: Store) -> None:
    """`semel reap` reaps once, and says in one line what came of it."""
    ended = semel("reap", "--store", url)
    assert ended.returncode == 0
    assert ended.stdout == "reaped: 1 deleted, 0 stripped, 0 abandoned, 0 audit lines deleted\n"
    assert set(states(keys)) == {"stuck", "opaque", "running"}
    again = json.loads(semel("reap", "--store", url, "--json", "--batch", "5").stdout)
    records = {"deleted": 0, "stripped": 0, "abandoned": 0, "audit_lines": 0, "batch": 5, "error": None}
    inbox = {"deleted": 0, "error": None}
    partitions = {"partitions_made": 0, "partitions_dropped": 0, "answers": 0, "trouble": None}
    assert again == records | partitions | {"inbox": inbox}


def test_reap_on_a_terminal(environment: dict[str, str], url: str, keys: Store) -> None:
    """On a terminal a long run says how many records it has found; the line goes when the report comes."""
    lines = in_a_terminal(["reap", "--store", url], environment | {"TERM": "xterm"})
    assert any("Reaping: 1" in line for line in lines)
    assert lines[-1].endswith("reaped: 1 deleted, 0 stripped, 0 abandoned, 0 audit lines deleted")


def test_reap_the_trail(semel: Semel, url: str, keys: Store) -> None:
    """How long the audit trail is kept can be said."""
    keys.perform(Note(Hold("acme", "expired", 1, bytes(16)), "fenced"))
    report = json.loads(semel("reap", "--store", url, "--audit-retention", "1ms", "--json").stdout)
    assert report["audit_lines"] >= 1
    assert keys.perform(ReadTrail("acme", "expired")) == ()


@pytest.mark.parametrize("command", ["sweep", "reap", "work"])
def test_not_migrated(semel: Semel, command: str, empty_postgres_url: str) -> None:
    """A database without Semel's tables is one line on standard error and exit code 1."""
    ended = semel(command, "--store", empty_postgres_url)
    assert ended.returncode == 1
    assert "semel migrate" in ended.stderr
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ("reap", "--audit-retention", "90"),
        ("reap", "--audit-retention", "0d"),
        ("work", "--sweep-every", "often"),
        ("work", "--reap-every", "-1s"),
        ("reap", "--batch", "0"),
    ],
)
def test_wrong_option(semel: Semel, sqlite_url: str, arguments: tuple[str, ...]) -> None:
    """A duration or a number that can't be is said to be wrong, with exit code 2."""
    semel("migrate", sqlite_url)
    ended = semel(*arguments, "--store", sqlite_url)
    assert ended.returncode == 2
    assert ended.stdout == ""


def test_durations() -> None:
    """Durations are a number and a unit."""
    assert [duration(text) for text in ("500ms", "10s", "15m", "12h", "90d")] == [
        timedelta(milliseconds=500),
        timedelta(seconds=10),
        timedelta(minutes=15),
        timedelta(hours=12),
        timedelta(days=90),
    ]
    for text in ("", "s", "1.5s", "10 s", "1w", "\u0663s", "9" * 12 + "d"):
        with pytest.raises(ConfigurationError, match="is not a duration"):
            duration(text)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_work(url: str, keys: Store, environment: dict[str, str], tmp_path: Path, number: signal.Signals) -> None:
    """`semel work` sweeps and reaps until it is told to end, and then ends in order."""
    command = [sys.executable, "-m", "semel", "work", "--store", url, "--sweep-every", "10ms", "--reap-every", "10ms"]
    with subprocess.Popen(
        command, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as working:
        assert working.stdout is not None
        assert working.stderr is not None
        assert working.stdout.readline() == "Sweeping every 10ms, reaping every 10ms. Ctrl-C ends it.\n"
        wanted = {"swept: 1 freed, 1 parked", "reaped: 1 deleted"}
        while wanted:
            line = working.stderr.readline()
            assert line, "it ended before it had done its work"
            wanted = {each for each in wanted if each not in line}
        working.send_signal(number)
        said, errors = working.communicate(timeout=60)
    assert working.returncode == 0
    assert said == f"{number.name}: finishing the current runs.\n"
    assert "Traceback" not in errors
    assert states(keys) == {"stuck": State.PROCESSING, "opaque": State.UNKNOWN, "running": State.PROCESSING}


def test_two_at_work(url: str, keys: Store, environment: dict[str, str], tmp_path: Path) -> None:
    """Two processes may work at once, and a killed one leaves its work to the other."""
    command = [sys.executable, "-m", "semel", "work", "--store", url, "--sweep-every", "10ms", "--reap-every", "10ms"]

    def started() -> "subprocess.Popen[str]":
        return subprocess.Popen(
            command, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    with started() as first, started() as second:
        for each in (first, second):
            assert each.stdout is not None
            assert each.stdout.readline()
        first.kill()
        first.wait(60)
        keys.perform(Claim("acme", "late", os.urandom(16), b"", OVER, DAY, on_crash="refuse"))
        assert second.stderr is not None
        while states(keys)["late"] is not State.UNKNOWN:
            assert second.stderr.readline(), "it ended"
        second.terminate()
        assert second.wait(60) == 0
