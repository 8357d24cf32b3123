"""`semel keys release` and `semel keys resolve`: what operators may say, what comes of it, and what is refused."""

import getpass
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import pytest

from semel.core.commands import Claim, Complete, FindStuck, Look, Park, ReadRequest, ReadTrail, Save, Verdict
from semel.core.derive import derive
from semel.core.message import Answer, Head, Request
from semel.core.record import NO_TOKEN, Found, Hold, Record
from semel.core.recovery import Begun, Done, Progress, read_back
from semel.core.state import Event, State
from semel.stores import Store, store
from semel.stores.base import this_user

Semel = Callable[..., subprocess.CompletedProcess[str]]

DAY, LONG, OVER = timedelta(days=1), timedelta(hours=1), timedelta(microseconds=1)
ME = f"{getpass.getuser()}@{socket.gethostname()}"

CREATED = Done("phase", "ride_created", {"id": 7})
CHARGING = Begun("charge_created")
REQUEST = Request(Head("POST", "/rides", b"", ()), b"{}", "acme")


@pytest.fixture(params=["sqlite_url", "postgres_url"])
def url(request: pytest.FixtureRequest) -> str:
    found: str = request.getfixturevalue(request.param)
    with closing(store(found)) as keys:
        keys.migrate()
    return found


def claim(keys: Store, key: str = "key", scope: str = "acme", lease: timedelta = LONG) -> Hold:
    hold = keys.perform(Claim(scope, key, os.urandom(16), b"\x0a" * 32, lease, DAY))
    assert isinstance(hold, Hold)
    return hold


def accept(keys: Store, key: str = "key") -> Hold:
    claim = Claim("acme", key, os.urandom(16), b"\x0a" * 32, LONG, DAY, request=REQUEST, is_accepted=True)
    hold = keys.perform(claim)
    assert isinstance(hold, Hold)
    return hold


def park(keys: Store, *steps: Done | Begun, key: str = "key", scope: str = "acme") -> Hold:
    hold = claim(keys, key, scope)
    if steps:
        keys.perform(Save(hold, Progress(steps)))
    assert keys.perform(Park(hold)) is Verdict.DONE
    return hold


def look(keys: Store, key: str = "key") -> Record | None:
    return keys.perform(Look("acme", key))


def trail(keys: Store, key: str = "key") -> list[tuple[str, str | None]]:
    """What this operator did, according to the audit trail."""
    lines = keys.perform(ReadTrail("acme", key))
    return [(line.event, line.detail) for line in lines if line.actor == ME]


# release


def test_released(semel: Semel, url: str, keys: Store) -> None:
    """A stuck key is shown, what will happen is said, and it is freed; the trail says by whom."""
    claim(keys, lease=OVER)
    ended = semel("keys", "release", "key", "--store", url, "--yes")
    assert ended.returncode == 0
    assert re.search(r"^stuck since ", ended.stdout, re.MULTILINE)
    assert "A retry will run the operation again" in ended.stdout
    assert ended.stdout.endswith("Freed.\n")
    assert look(keys) is None
    assert trail(keys) == [("discarded", None)]
    assert isinstance(keys.perform(Claim("acme", "key", os.urandom(16), b"", LONG, DAY)), Hold)


def test_releasing_a_live_worker(semel: Semel, url: str, keys: Store) -> None:
    """A key whose worker is alive can be freed; that it is alive is said, and it can store nothing any more."""
    hold = claim(keys)
    assert "Its worker may be alive (lease 59m)" in semel("keys", "release", "key", "--store", url, "--yes").stdout
    assert keys.perform(Complete(hold, Event.COMPLETE, Answer(201))) is Verdict.FENCED


def test_releasing_forgets_steps(semel: Semel, url: str, keys: Store) -> None:
    """Which steps will be done again is said before a key is freed."""
    park(keys, CREATED, CHARGING)
    shown = semel("keys", "release", "key", "--store", url, "--yes").stdout
    assert "will be done again: ride_created." in shown
    assert look(keys) is None


def test_releasing_what_nobody_has_begun(semel: Semel, url: str, keys: Store) -> None:
    """An operation that waits for a worker can be forgotten; what its client was promised is said before."""
    accept(keys)
    shown = semel("keys", "release", "key", "--store", url, "--yes").stdout
    assert re.search(r"^accepted +to be run by a worker$", shown, re.MULTILINE)
    assert "This operation was not begun, and no worker will run it." in shown
    assert "will find nothing at the status URL" in shown
    assert look(keys) is None
    assert trail(keys) == [("discarded", None)]


def test_releasing_what_has_ended(semel: Semel, url: str, keys: Store) -> None:
    """An operation that has ended keeps its answer."""
    keys.perform(Complete(claim(keys), Event.COMPLETE, Answer(201)))
    ended = semel("keys", "release", "key", "--store", url, "--yes")
    assert ended.returncode == 1
    assert "has ended" in ended.stderr
    record = look(keys)
    assert record is not None
    assert record.state is State.COMPLETE


# Asking


@pytest.mark.parametrize("command", [("release", "key"), ("resolve", "key", "--not-applied")])
@pytest.mark.parametrize("said, status", [("n\n", 1), ("", 1), ("y\n", 0)])
def test_asking(sqlite_url: str, environment: dict[str, str], command: tuple[str, ...], said: str, status: int) -> None:
    """Nothing is done unless the question is answered with yes; no answer is a no."""
    with closing(store(sqlite_url)) as keys:
        park(keys)
        ended = subprocess.run(
            [sys.executable, "-m", "semel", "keys", *command, "--store", sqlite_url],
            input=said,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == status
        assert "[y/N]" in ended.stdout
        assert (look(keys) is None) == (status == 0)


@pytest.mark.parametrize("command", [("release",), ("resolve", "--not-applied"), ("resolve", "--applied", "1")])
def test_whose(semel: Semel, url: str, keys: Store, command: tuple[str, ...]) -> None:
    """A key that several owners use is changed for one of them only; a key that is not there, for nobody."""
    for scope in ("acme", "globex"):
        park(keys, scope=scope)
    name, *options = command
    ended = semel("keys", name, "key", *options, "--yes", "--store", url)
    assert ended.returncode == 2
    assert "acme, globex" in ended.stderr or "globex, acme" in ended.stderr
    assert semel("keys", name, "key", *options, "--yes", "--store", url, "--scope", "globex").returncode == 0
    record = look(keys)
    assert record is not None
    assert record.state is State.UNKNOWN
    missing = semel("keys", name, "nobody's", *options, "--yes", "--store", url)
    assert (missing.returncode, missing.stderr.count("\n")) == (1, 1)


# resolve


def test_effect_applied(semel: Semel, url: str, keys: Store) -> None:
    """An effect that happened gets its result, and the operation may be taken over behind it at once."""
    hold = park(keys, CREATED, CHARGING)
    ended = semel("keys", "resolve", "key", "--applied", '{"id": "ch_1"}', "--store", url, "--yes")
    assert ended.returncode == 0
    assert "effect charge_created begun: outcome unknown" in ended.stdout
    assert "charge_created is done, with the result below. A retry will go on after it." in ended.stdout
    found = keys.perform(Claim("acme", "key", os.urandom(16), hold.token, LONG, DAY))
    assert isinstance(found, Found)
    assert (found.state, found.token, found.lease_is_over) == (State.PROCESSING, NO_TOKEN, True)
    assert read_back(found.steps) == Progress((CREATED, Done("effect", "charge_created", {"id": "ch_1"})))
    assert trail(keys) == [("resolved", None), ("applied", "charge_created")]


def test_effect_not_applied(semel: Semel, url: str, keys: Store) -> None:
    """An effect that did not happen is forgotten, and the operation goes on from the step before it."""
    park(keys, CREATED, CHARGING)
    ended = semel("keys", "resolve", "key", "--not-applied", "--store", url, "--yes")
    assert "A retry will go on after ride_created, and do charge_created." in ended.stdout
    record = look(keys)
    assert record is not None
    assert record.is_stuck
    assert (record.recovery_point, read_back(record.steps)) == ("ride_created", Progress((CREATED,)))
    assert trail(keys) == [("resolved", None), ("not applied", "charge_created")]


def test_operation_applied(semel: Semel, url: str, keys: Store) -> None:
    """An operation without an unknown effect ends with the answer that the operator gives, and a retry gets it."""
    park(keys)
    ended = semel("keys", "resolve", "key", "--applied", '{"id": 7}', "--store", url, "--yes")
    assert "The operation ends with status 200 and the result below." in ended.stdout
    record = look(keys)
    assert record is not None
    assert record.state is State.COMPLETE
    assert record.answer == Answer(200, ((b"content-type", b"application/json"),), b'{"id": 7}')
    assert trail(keys) == [("resolved", None), ("applied", None)]


def test_operation_applied_with_an_answer(semel: Semel, url: str, keys: Store) -> None:
    """The answer may have the status and the headers that the operation's own would have had."""
    park(keys)
    ended = semel(
        *("keys", "resolve", "key", "--applied", '{"id": 7}', "--status", "201"),
        *("--header", "Location: /rides/7", "--header", 'ETag: "a"', "--store", url, "--yes"),
    )
    assert "The operation ends with status 201 and the result below." in ended.stdout
    assert "location: /rides/7" in ended.stdout
    record = look(keys)
    assert record is not None
    headers = ((b"content-type", b"application/json"), (b"location", b"/rides/7"), (b"etag", b'"a"'))
    assert record.answer == Answer(201, headers, b'{"id": 7}')


def test_operation_applied_with_a_body(semel: Semel, url: str, keys: Store, tmp_path: Path) -> None:
    """A body that is no JSON is taken from a file, as it is; `204` has none."""
    park(keys)
    park(keys, key="empty")
    (tmp_path / "body").write_bytes(b"a,b\n\xff")
    given = ("--body-file", "body", "--store", url, "--yes")
    unsaid = semel("keys", "resolve", "key", *given)
    assert (unsaid.returncode, "--header 'Content-Type" in unsaid.stderr) == (2, True)
    assert semel("keys", "resolve", "key", *given, "--header", "Content-Type: text/csv").returncode == 0
    assert semel("keys", "resolve", "empty", "--applied", "null", "--status", "204", *given[2:]).returncode == 0
    record, empty = look(keys), look(keys, "empty")
    assert record is not None
    assert empty is not None
    assert record.answer == Answer(200, ((b"content-type", b"text/csv"),), b"a,b\n\xff")
    assert empty.answer == Answer(204, (), b"")


@pytest.mark.parametrize(
    "options, said",
    [
        (("--status", "99"), "no status of an answer"),
        (("--header", "Location"), "is no header"),
        (("--header", "X: a\nSet-Cookie: b"), "is no header"),
        (("--header", "Set-Cookie: a=b"), "never repeated"),
        (("--header", "Content-Length: 9"), "never repeated"),
        (("--body-file", "absent"), "Say what happened"),
    ],
)
def test_answers_that_can_not_be(semel: Semel, sqlite_url: str, options: tuple[str, ...], said: str) -> None:
    """An answer that could not be sent is refused in one line, and nothing is changed."""
    with closing(store(sqlite_url)) as keys:
        park(keys)
        ended = semel("keys", "resolve", "key", "--applied", "1", *options, "--store", sqlite_url, "--yes")
        assert (ended.returncode, ended.stderr.count("\n")) == (2, 1)
        assert said in ended.stderr
        record = look(keys)
        assert record is not None
        assert record.state is State.UNKNOWN


@pytest.mark.parametrize("said", [("--applied", "1"), ("--not-applied",)])
def test_an_answer_of_what_goes_on(semel: Semel, sqlite_url: str, said: tuple[str, ...]) -> None:
    """An operation that goes on is answered by its handler: a status for it is refused."""
    with closing(store(sqlite_url)) as keys:
        park(keys, CHARGING)
        ended = semel("keys", "resolve", "key", *said, "--status", "201", "--store", sqlite_url, "--yes")
        assert (ended.returncode, "its handler answers" in ended.stderr) == (2, True)
        assert trail(keys) == []


def test_reasons(semel: Semel, url: str, keys: Store) -> None:
    """A reason is a line of the audit trail, as in the console."""
    park(keys)
    semel("keys", "resolve", "key", "--applied", "1", "--reason", " asked the bank ", "--store", url, "--yes")
    assert trail(keys) == [("resolved", None), ("applied", None), ("explained", "asked the bank")]
    claim(keys, "other")
    semel("keys", "release", "other", "--reason", "a test", "--store", url, "--yes")
    assert trail(keys, "other") == [("discarded", None), ("explained", "a test")]


def test_operation_not_applied(semel: Semel, url: str, keys: Store) -> None:
    """An operation that did nothing is forgotten, and a retry runs it."""
    park(keys)
    ended = semel("keys", "resolve", "key", "--not-applied", "--store", url, "--yes")
    assert "A retry will run the operation again from its beginning." in ended.stdout
    assert look(keys) is None
    assert trail(keys) == [("discarded", None), ("not applied", None)]


def test_accepted_operation_not_applied(semel: Semel, url: str, keys: Store) -> None:
    """One that was accepted and did nothing is kept, for a worker to run it from its beginning."""
    hold = accept(keys)
    assert keys.perform(Park(hold)) is Verdict.DONE
    ended = semel("keys", "resolve", "key", "--not-applied", "--store", url, "--yes")
    assert "A worker will run the operation again from its beginning." in ended.stdout
    (stuck,) = keys.perform(FindStuck(9, with_request=True, with_no_token=True))
    assert (stuck.hold, stuck.is_accepted) == (Hold("acme", "key", 2, NO_TOKEN), True)
    assert keys.perform(ReadRequest(stuck.hold)) == REQUEST
    assert trail(keys) == [("resolved", None), ("not applied", None)]


@pytest.mark.parametrize("options", [(), ("--applied", "1", "--not-applied")])
def test_say_one_thing(semel: Semel, options: tuple[str, ...]) -> None:
    """An operator says that it happened or that it did not, and not both."""
    ended = semel("keys", "resolve", "key", *options, "--store", "sqlite:///none.db")
    assert ended.returncode == 2
    assert "either --applied RESULT or --not-applied" in ended.stderr


@pytest.mark.parametrize("result", ["", "ch_1", "{id: 7}", "NaN", "[1, Infinity]", "[" * 100_000, '{"a": 1, "a": 2}'])
def test_result_that_is_not_json(semel: Semel, sqlite_url: str, result: str) -> None:
    """A result that is not JSON changes nothing, and one line says how to write it."""
    with closing(store(sqlite_url)) as keys:
        park(keys, CHARGING)
        ended = semel("keys", "resolve", "key", "--applied", result, "--store", sqlite_url, "--yes")
        assert ended.returncode == 2
        assert "Quote it for the shell" in ended.stderr
        assert ended.stderr.count("\n") == 1
        record = look(keys)
        assert record is not None
        assert record.state is State.UNKNOWN


def test_nothing_to_resolve(semel: Semel, url: str, keys: Store) -> None:
    """What is in progress, stuck, pending or ended is not resolved, and it is said what to do instead."""
    claim(keys, "running")
    accept(keys, "pending")
    claim(keys, "stuck", lease=OVER)
    keys.perform(Complete(claim(keys, "ended"), Event.COMPLETE, Answer(201)))
    for key, said in (
        ("running", "is in progress"),
        ("stuck", "semel sweep"),
        ("pending", "waits for a worker"),
        ("ended", "has ended"),
    ):
        ended = semel("keys", "resolve", key, "--not-applied", "--store", url, "--yes")
        assert ended.returncode == 1
        assert said in ended.stderr


def test_resolved_meanwhile(url: str, keys: Store, environment: dict[str, str], tmp_path: Path) -> None:
    """An operator who is asked while another resolves the same operation changes nothing."""
    hold = park(keys)
    command = [sys.executable, "-m", "semel", "keys", "resolve", "key", "--not-applied", "--store", url]
    with subprocess.Popen(
        command,
        env=environment,
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as asked:
        assert asked.stdout is not None
        while "again from its beginning" not in (line := asked.stdout.readline()):
            assert line
        subprocess.run([*command, "--yes"], env=environment, cwd=tmp_path, check=True, capture_output=True)
        claim(keys)
        _, told = asked.communicate("y\n")
    assert asked.returncode == 1
    assert "The record has changed meanwhile" in told
    record = look(keys)
    assert record is not None
    assert record.token != hold.token


def test_operator_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user who has a number and no name is called by the number."""

    def nameless() -> str:
        raise OSError("No username set in the environment")

    assert this_user() == ME
    monkeypatch.setattr(getpass, "getuser", nameless)
    assert this_user() == f"{os.getuid()}@{socket.gethostname()}"


# list and show


def test_parked_ones_are_listed(semel: Semel, url: str, keys: Store) -> None:
    """What is to be resolved can be listed."""
    park(keys, CREATED, CHARGING, key="parked")
    claim(keys, "running")
    lines = semel("keys", "list", "--state", "unknown", "--store", url).stdout.splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == ["parked"]
    assert lines[1].endswith("to be resolved")


def test_steps_and_trail_are_shown(semel: Semel, url: str, keys: Store) -> None:
    """A key is shown with its steps, each with its result, and with its audit trail, oldest first."""
    park(keys, CREATED, Done("effect", "receipt_sent", "x" * 500), CHARGING)
    shown = semel("keys", "show", "key", "--store", url).stdout
    for line in (
        r"state +unknown",
        r"recovery point +receipt_sent",
        r'steps +phase ride_created done: \{"id": 7\}',
        r' +effect receipt_sent done: "x+\.\.\. \(502 characters; --json has them all\)',
        r" +effect charge_created begun: outcome unknown",
        rf" +its key at the provider: {derive('acme', 'key', 'charge_created')}",
        r"trail +\S+  attempt 1  claimed",
        r" +\S+  attempt 1  saved \(effect charge_created begun\)  by \S+:\d+",
        r" +\S+  attempt 1  parked  by \S+:\d+",
    ):
        assert re.search(f"^{line}$", shown, re.MULTILINE), line
    facts = json.loads(semel("keys", "show", "key", "--store", url, "--json").stdout)
    assert facts["steps"][0] == {"phase": "ride_created", "outcome": "done", "result": {"id": 7}}
    charge = {"effect": "charge_created", "outcome": "unknown"}
    assert facts["steps"][2] == charge | {"idempotency_key": derive("acme", "key", "charge_created")}
    assert [line["event"] for line in facts["trail"]] == ["claimed", "saved", "parked"]


def test_trail_outlives_the_record(semel: Semel, url: str, keys: Store) -> None:
    """What became of a key that is gone can be asked for, by its owner; without the owner it is not there."""
    park(keys)
    semel("keys", "release", "key", "--store", url, "--yes")
    shown = semel("keys", "show", "key", "--scope", "acme", "--store", url).stdout
    assert re.search(r"^state +gone$", shown, re.MULTILINE)
    assert f"discarded  by {ME}" in shown
    facts = json.loads(semel("keys", "show", "key", "--scope", "acme", "--json", "--store", url).stdout)
    assert (facts["state"], facts["trail"][-1]["actor"]) == (None, ME)
    assert semel("keys", "show", "key", "--store", url).returncode == 1
