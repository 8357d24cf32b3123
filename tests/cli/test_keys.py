"""`semel keys list` and `semel keys show`."""

import json
import os
import pty
import re
import shlex
import sqlite3
import subprocess
import sys
from base64 import b64decode
from collections.abc import Callable
from contextlib import closing, suppress
from datetime import timedelta
from pathlib import Path
from uuid import UUID

import pytest

from semel.core.commands import Claim, Complete, Mark, Note, Park, Save, TakeOver, Verdict
from semel.core.key import digest_of
from semel.core.message import Answer, Head, Request
from semel.core.record import Hold, Milestone
from semel.core.recovery import Done, Progress
from semel.core.state import Event
from semel.stores import Store, store
from semel.testing import Clock

Semel = Callable[..., subprocess.CompletedProcess[str]]

DAY = timedelta(days=1)
LONG, OVER = timedelta(hours=1), timedelta(microseconds=1)
BINARY = bytes(range(256)) * 2


@pytest.fixture(params=["sqlite_url", "postgres_url"])
def url(request: pytest.FixtureRequest) -> str:
    """A store with a key in each state."""
    found: str = request.getfixturevalue(request.param)
    keys = store(found)
    keys.migrate()
    headers = ((b"content-type", b"application/json"), (b"link", b"</a>"), (b"link", b"</b>"))
    finish(keys, claim(keys, "paid"), Event.COMPLETE, Answer(201, headers, b'{"charge": 1}\n'))
    finish(keys, claim(keys, "broken"), Event.FAIL, Answer(500, (), BINARY))
    finish(keys, claim(keys, "streamed"), Event.COMPLETE, Answer(200, (), None))
    claim(keys, "running")
    claim(keys, "stuck", lease=OVER)
    claim(keys, "shared", scope="globex")
    claim(keys, "shared", scope="acme\tPOST /payments")
    keys.close()
    return found


def claim(keys: Store, key: str, scope: str = "acme", lease: timedelta = LONG) -> Hold:
    hold = keys.perform(Claim(scope, key, os.urandom(16), b"\x0a" * 32, lease, DAY))
    assert isinstance(hold, Hold)
    return hold


def finish(keys: Store, hold: Hold, event: Event, answer: Answer) -> None:
    keys.perform(Complete(hold, event, answer))


def cells(line: str) -> list[str]:
    return re.split(r" {2,}", line.strip())


def test_list(semel: Semel, url: str) -> None:
    """One line a key, the newest first: key, owner, state, attempts, status, age, and when that ends."""
    lines = semel("keys", "list", "--store", url).stdout.splitlines()
    assert cells(lines[0]) == ["key", "scope", "state", "try", "status", "age", "ends"]
    rows = {tuple(cells(line)[:2]): cells(line)[2:5] + cells(line)[6:] for line in lines[1:]}
    assert next(iter(rows)) == ("shared", r"acme\tPOST /payments")
    assert rows["paid", "acme"] == ["complete", "1", "201", "kept 23h"]
    assert rows["broken", "acme"] == ["failed", "1", "500", "kept 23h"]
    assert rows["running", "acme"] == ["processing", "1", "-", "lease 59m"]
    assert rows["stuck", "acme"][3].startswith("stuck ")


def test_list_piped(semel: Semel, url: str) -> None:
    """In a pipe there are no colours and no blanks at the ends of lines."""
    shown = semel("keys", "list", "--store", url).stdout
    assert "\x1b" not in shown
    assert not re.search(r" $", shown, re.MULTILINE)


def test_list_of_what_is_to_be_resolved(semel: Semel, url: str) -> None:
    """What is parked is listed however old it is, past its retention too, and says that it is to be resolved."""
    with closing(store(url)) as keys:
        for key in ("parked", "forgotten"):
            parked = keys.perform(Claim("acme", key, os.urandom(16), b"", LONG, OVER))
            assert isinstance(parked, Hold)
            assert keys.perform(Park(parked)) is Verdict.DONE
        finish(keys, claim(keys, "newer"), Event.COMPLETE, Answer(201, (), b""))
    for narrowed, names in (
        (("--limit", "1"), ["newer", "forgotten", "parked"]),
        (("--state", "unknown"), ["forgotten", "parked"]),
        (("--state", "complete", "--limit", "1"), ["newer"]),
    ):
        lines = semel("keys", "list", *narrowed, "--store", url).stdout.splitlines()
        rows = {cells(line)[0]: cells(line)[-1] for line in lines[1 : 1 + len(names)]}
        assert list(rows) == names
        assert {rows[name] for name in names if name != "newer"} <= {"to be resolved"}
    shown = json.loads(semel("keys", "list", "--limit", "1", "--json", "--store", url).stdout)
    assert {each["key"]: each["is_expired"] for each in shown if each["state"] == "unknown"} == {
        "parked": False,
        "forgotten": False,
    }
    assert "it is resolved" in semel("keys", "show", "forgotten", "--store", url).stdout


def test_list_narrowed(semel: Semel, url: str) -> None:
    """A list can be narrowed down by state, by owner and by number; one owner is said once, below it."""
    failed = semel("keys", "list", "--store", url, "--state", "failed").stdout.splitlines()
    assert [cells(line)[0] for line in failed] == ["key", "broken", "scope: acme"]
    globex = semel("keys", "list", "--store", url, "--scope", "globex").stdout.splitlines()
    assert [cells(line)[0] for line in globex] == ["key", "shared", "scope: globex"]
    assert len(semel("keys", "list", "--store", url, "--limit", "2").stdout.splitlines()) == 3


def test_list_json(semel: Semel, url: str) -> None:
    """Machines get every fact that a list has, under stable names, and no claim token."""
    records = json.loads(semel("keys", "list", "--store", url, "--json").stdout)
    stuck = next(record for record in records if record["key"] == "stuck")
    assert len(records) == 7
    assert stuck["is_stuck"]
    assert stuck["state"] == "processing"
    assert stuck["lease_expires_at"] <= stuck["read_at"]
    assert not any("token" in record for record in records)


def test_list_empty(semel: Semel, sqlite_url: str) -> None:
    """An empty store is said to be empty; as JSON it is an empty list."""
    semel("migrate", sqlite_url)
    assert semel("keys", "list", "--store", sqlite_url).stdout == "No keys.\n"
    assert semel("keys", "list", "--store", sqlite_url, "--json").stdout == "[]\n"


def test_list_in_a_terminal(environment: dict[str, str], sqlite_url: str) -> None:
    """A UUID and all that belongs to it is one line of an 80-column terminal, in colour."""
    keys = store(sqlite_url)
    claim(keys, str(UUID(int=1)), lease=OVER)
    keys.close()
    lines = in_a_terminal(["keys", "list", "--store", sqlite_url], environment | {"COLUMNS": "80", "TERM": "xterm"})
    assert "\x1b[1;31mstuck" in lines[1]
    plain = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in lines]
    assert plain[1].startswith(str(UUID(int=1)))
    assert max(map(len, plain)) <= 80


def test_show_in_a_terminal(environment: dict[str, str], semel: Semel, sqlite_url: str) -> None:
    """A command that is shown can be copied from a narrow terminal and run, whatever key a client has sent."""
    key, scope = f"--yes $HOME it's {UUID(int=1)}", "-acme & sons\t\\t"
    with closing(store(sqlite_url)) as keys:
        keys.perform(Park(claim(keys, key, scope)))
    narrow = environment | {"COLUMNS": "80", "TERM": "xterm"}
    lines = in_a_terminal(["keys", "show", digest_of(key)[:12], "--store", sqlite_url], narrow)
    (copied,) = [each for each in lines if each.endswith("--not-applied")]
    program, *arguments = shlex.split(copied)
    assert (program, semel(*arguments, "--yes", SEMEL_STORE=sqlite_url).returncode) == ("semel", 0)


def in_a_terminal(arguments: list[str], environment: dict[str, str]) -> list[str]:
    terminal, end = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "semel", *arguments], env=environment, stdin=end, stdout=end, stderr=end
    ):
        os.close(end)
        shown = b""
        with suppress(OSError):  # Linux: the last of those who had the terminal open has gone.
            while chunk := os.read(terminal, 4096):
                shown += chunk
    os.close(terminal)
    return shown.decode().splitlines()


def test_control_characters(semel: Semel, sqlite_url: str) -> None:
    """What came from strangers can't move the cursor."""
    keys = store(sqlite_url)
    claim(keys, "a\x1b[2Jb")
    keys.close()
    assert "\x1b" not in semel("keys", "list", "--store", sqlite_url).stdout
    assert "\x1b" not in semel("keys", "show", "a\x1b[2Jb", "--store", sqlite_url).stdout


def test_show(semel: Semel, url: str) -> None:
    """One key is shown with everything but its body, times both absolute and relative."""
    shown = semel("keys", "show", "paid", "--store", url).stdout
    for line in (
        r"key +paid",
        r"scope +acme",
        r"state +complete",
        r"attempt +1",
        r"fingerprint +(0a){32}",
        r"created +\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00 \(\d+s ago\)",
        r"ended +.* ago\)",
        r"kept until +.* \(in 23h\)",
        r"status +201",
        r"headers +content-type: application/json",
        r" +link: </a>",
        r" +link: </b>",
        r"body +14 bytes \(to see it: --body\)",
    ):
        assert re.search(f"^{line}$", shown, re.MULTILINE), line
    assert "charge" not in shown


def test_show_the_story(semel: Semel, sqlite_url: str) -> None:
    """What was asked for, and what the record tells by itself, are shown among the lines of the audit trail."""
    with closing(store(sqlite_url)) as keys:
        hour = timedelta(hours=1)
        token = bytes(range(16))
        trace = f"00-{'a1' * 16}-{'b2' * 8}-01"
        hold = keys.perform(
            Claim("acme", "told", token, b"", hour, hour, request_line="POST /payments", traceparent=trace)
        )
        assert isinstance(hold, Hold)
        Clock(sqlite_url).advance(timedelta(milliseconds=1))  # A record that ends when it begins tells of no claim.
        keys.perform(Note(hold, "fenced", "an answer"))
        keys.perform(Complete(hold, Event.COMPLETE, Answer(201)))
    shown = semel("keys", "show", "told", "--store", sqlite_url).stdout
    for line in (
        r"request +POST /payments",
        f"trace +{'a1' * 16}",
        r"trail +\S+  attempt 1  claimed",
        r" +\S+  attempt 1  fenced \(an answer\)  by \S+:\d+",
        r" +\S+  attempt 1  completed",
    ):
        assert re.search(f"^{line}$", shown, re.MULTILINE), line
    facts = json.loads(semel("keys", "show", "told", "--store", sqlite_url, "--json").stdout)
    assert (facts["request_line"], facts["trace_id"]) == ("POST /payments", "a1" * 16)
    assert [(line["event"], line["actor"] is None) for line in facts["trail"]] == [
        ("claimed", True),
        ("fenced", False),
        ("completed", True),
    ]


def test_show_body(semel: Semel, url: str) -> None:
    """A text is shown as it is, any other body as the head of a hex dump; one that was not kept is said to be."""
    assert semel("keys", "show", "paid", "--store", url, "--body").stdout.endswith('\n{"charge": 1}\n\n')
    binary = semel("keys", "show", "broken", "--store", url, "--body").stdout
    assert "00000040  40 41 42 43" in binary
    assert "|@ABCDEFGHIJKLMNO|" in binary
    assert "... and 256 bytes more" in binary
    assert "not kept" in semel("keys", "show", "streamed", "--store", url, "--body").stdout


def test_show_json(semel: Semel, url: str) -> None:
    """As JSON a key has its headers in order, repeats and all, and with --body every byte of its body."""
    paid = json.loads(semel("keys", "show", "paid", "--store", url, "--json").stdout)
    assert paid["headers"] == [["content-type", "application/json"], ["link", "</a>"], ["link", "</b>"]]
    assert paid["body_bytes"] == 14
    assert "body_base64" not in paid
    broken = json.loads(semel("keys", "show", "broken", "--store", url, "--json", "--body").stdout)
    assert b64decode(broken["body_base64"]) == BINARY


def test_show_stuck(semel: Semel, url: str) -> None:
    """A key whose worker is gone says since when."""
    assert re.search(r"^stuck since +.* ago\)$", semel("keys", "show", "stuck", "--store", url).stdout, re.MULTILINE)


def test_a_key_that_was_freed_half_way(semel: Semel, sqlite_url: str) -> None:
    """After a sweep, an operation with steps is free, and not stuck: there is nothing to type about it any more."""
    with store(sqlite_url) as keys:
        keys.migrate()
        hold = claim(keys, "half-way")
        keys.perform(Save(hold, Progress((Done("phase", "ordered", 7),))))
    Clock(sqlite_url).advance(2 * LONG)
    assert "half-way" in semel("keys", "list", "--state", "stuck", "--store", sqlite_url).stdout
    assert "1 freed" in semel("sweep", "--store", sqlite_url).stdout
    assert "half-way" not in semel("keys", "list", "--state", "stuck", "--store", sqlite_url).stdout
    assert "  free 1h" in semel("keys", "list", "--store", sqlite_url).stdout
    shown = semel("keys", "show", "half-way", "--store", sqlite_url).stdout
    assert re.search(r"^free since +.* ago\)$", shown, re.MULTILINE)
    assert "semel sweep" not in shown


def test_show_accepted(semel: Semel, url: str) -> None:
    """A key that a worker is to run says so; once it has begun, how far its handler says it is."""
    request = Request(Head("POST", "/reports", b"", ()), b"", "acme")
    with closing(store(url)) as keys:
        hold = keys.perform(Claim("acme", "report", os.urandom(16), b"", LONG, DAY, request=request, is_accepted=True))
        assert isinstance(hold, Hold)
        (pending,) = semel("keys", "list", "--store", url, "--state", "pending").stdout.splitlines()[1:-1]
        assert cells(pending)[-1] == "to be begun"
        begun = keys.perform(TakeOver(Claim("acme", "report", os.urandom(16), b"", LONG, DAY), hold, is_abandoned=True))
        assert isinstance(begun, Hold)
        keys.perform(Mark(begun, Milestone(0.4, "charging\x1b[2J")))
    shown = semel("keys", "show", "report", "--store", url).stdout
    assert re.search(r"^accepted +to be run by a worker$", shown, re.MULTILINE)
    assert re.search(r"^progress +40%: charging", shown, re.MULTILINE)
    assert "\x1b" not in shown
    facts = json.loads(semel("keys", "show", "report", "--store", url, "--json").stdout)
    assert (facts["is_accepted"], facts["progress"], facts["note"]) == (True, 0.4, "charging\x1b[2J")
    paid = json.loads(semel("keys", "show", "paid", "--store", url, "--json").stdout)
    assert (paid["is_accepted"], paid["progress"], paid["note"]) == (False, None, None)


def test_show_shared(semel: Semel, url: str) -> None:
    """A key that several owners use is shown for one of them; who they are is said, ready to be pasted."""
    ended = semel("keys", "show", "shared", "--store", url)
    assert ended.returncode == 2
    assert r"'acme\tPOST /payments', globex" in ended.stderr
    for spelled in ("acme\tPOST /payments", r"acme\tPOST /payments"):
        chosen = semel("keys", "show", "shared", "--scope", spelled, "--store", url)
        assert re.search(r"^scope +acme\\tPOST /payments$", chosen.stdout, re.MULTILINE)


def test_show_missing(semel: Semel, url: str) -> None:
    """A key that is not there is one line and exit code 1."""
    ended = semel("keys", "show", "nobody's", "--store", url)
    assert ended.returncode == 1
    assert ended.stderr.startswith("semel: The store has no key ")
    assert semel("keys", "show", "paid", "--scope", "globex", "--store", url).returncode == 1


def test_usual_file(semel: Semel, tmp_path: Path) -> None:
    """Where nothing is said, the middleware's usual file in this folder is looked into."""
    semel("migrate", f"sqlite:///{tmp_path}/semel.db")
    assert semel("keys", "list").stdout == "No keys.\n"


def test_missing_file(semel: Semel, tmp_path: Path) -> None:
    """Looking into a file that is not there does not make it."""
    ended = semel("keys", "list", "--store", f"sqlite:///{tmp_path}/none.db")
    assert ended.returncode == 2
    assert "There is no file" in ended.stderr
    assert not (tmp_path / "none.db").exists()


def test_foreign_file(semel: Semel, tmp_path: Path) -> None:
    """Looking for keys in somebody else's database makes no table in it, and says that there is none."""
    path = tmp_path / "theirs.db"
    with closing(sqlite3.connect(path)) as theirs:
        theirs.execute("CREATE TABLE things (name TEXT)")
    told = semel("keys", "list", "--store", f"sqlite:///{path}")
    assert told.returncode == 2
    assert "does not have Semel's table semel_keys" in told.stderr
    with closing(sqlite3.connect(path)) as theirs:
        assert theirs.execute("SELECT name FROM sqlite_master").fetchall() == [("things",)]


def test_not_migrated(semel: Semel, empty_postgres_url: str) -> None:
    """A database without Semel's table is told apart from an empty one, and the way out is named."""
    ended = semel("keys", "list", "--store", empty_postgres_url)
    assert ended.returncode == 1
    assert "semel migrate" in ended.stderr
