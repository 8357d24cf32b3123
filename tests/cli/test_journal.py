"""`semel journal`."""

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from semel.client import Journal
from semel.core.intent import Outgoing, Wish
from semel.core.message import Answer
from tests.client.served import Served, served

Semel = Callable[..., subprocess.CompletedProcess[str]]

DAY = 86_400.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path) as server:
        yield server


@pytest.fixture
def journal(tmp_path: Path, server: Served) -> Iterator[Journal]:
    """One that is done, and one that a crash has left."""
    begun = time.time() - 7200
    with Journal(tmp_path / "payments.journal", lease=timedelta(milliseconds=1), clock=lambda: begun) as journal:
        for intent in ("invoice 17", "invoice 18"):
            headers = ((b"content-type", b"application/json"),)
            outgoing = Outgoing("POST", f"{server.url}/pay", headers, b'{"for": "%s"}' % intent.encode())
            journal.begin(Wish(intent, intent.replace("invoice ", "key-"), outgoing, DAY, 60), b"dead")
        journal.settle("invoice 17", "key-17", Answer(201, (), b"paid"))
    with Journal(tmp_path / "payments.journal") as journal:
        yield journal


def test_list(semel: Semel, journal: Journal) -> None:
    """`journal list` shows what is pending and what is done, and the answer's status."""
    done = semel("journal", "list", "payments.journal")
    assert done.returncode == 0, done.stderr
    head, first, second = done.stdout.splitlines()
    assert head.split()[:3] == ["intent", "key", "state"]
    assert "done" in first
    assert first.split()[-1] == "201"
    assert "pending" in second
    (pending,) = json.loads(semel("journal", "list", "payments.journal", "--state", "pending", "--json").stdout)
    assert (pending["intent"], pending["key"], pending["status"]) == ("invoice 18", "key-18", None)
    assert semel("journal", "list", "payments.journal", "--state", "unknown").stdout == "No entries.\n"


def test_resume(semel: Semel, journal: Journal, server: Served) -> None:
    """`journal resume` sends what is pending, with its key and with the credentials of the command line."""
    header = "Authorization: Bearer env:TOKEN"
    done = semel("journal", "resume", "payments.journal", "--header", header, TOKEN="fresh")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "invoice 18  key-18  201\n1 resumed.\n"
    (seen,) = server.seen
    assert (seen.key, seen.header("authorization"), seen.body) == (
        "key-18",
        "Bearer fresh",
        b'{"for": "invoice 18"}',
    )
    assert semel("journal", "resume", "payments.journal").stdout == "0 resumed.\n"


def test_resume_for_an_account(semel: Semel, journal: Journal, server: Served) -> None:
    """What a client with an account has written down is sent for that account only."""
    begun = time.time() - 60
    with Journal(journal.path, lease=timedelta(milliseconds=1), clock=lambda: begun) as crashed:
        crashed.forget("invoice 18")
        sent = Outgoing("POST", f"{server.url}/pay", (), b"{}")
        crashed.begin(Wish("invoice 19", "key-19", sent, DAY, 60, account="customer 7"), b"dead")
    refused = semel("journal", "resume", "payments.journal", "--account", "customer 8")
    assert ("IntentDiffers" in refused.stdout, server.seen) == (True, [])
    done = semel("journal", "resume", "payments.journal", "--account", "customer 7")
    assert (done.returncode, done.stdout) == (0, "invoice 19  key-19  201\n1 resumed.\n")


def test_resume_to_several_hosts(semel: Semel, journal: Journal, server: Served) -> None:
    """A credential of the command line goes to the hosts that the command line names, where there are several."""
    begun = time.time() - 60
    url = f"http://localhost:{server.port}/pay"
    with Journal(journal.path, lease=timedelta(milliseconds=1), clock=lambda: begun) as crashed:
        crashed.begin(Wish("invoice 19", "key-19", Outgoing("POST", url, (), b"{}"), DAY, 60), b"dead")
    given = ("journal", "resume", "payments.journal", "--header", "Authorization: Bearer env:TOKEN")
    refused = semel(*given, TOKEN="fresh")
    assert (refused.returncode, server.seen) == (2, [])
    assert "--host" in refused.stderr
    done = semel(*given, "--host", "127.0.0.1", TOKEN="fresh")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "invoice 18  key-18  201\n1 resumed.\n"
    assert [(each.key, each.header("host")) for each in server.seen] == [("key-18", server.host)]
    assert semel("journal", "resume", "payments.journal").stdout == "invoice 19  key-19  201\n1 resumed.\n"


def test_resume_without_a_credential(semel: Semel, journal: Journal, server: Served) -> None:
    """Without a header of the command line, there is nothing that a host should not get: all is sent."""
    url = f"http://localhost:{server.port}/pay"
    with Journal(journal.path, lease=timedelta(milliseconds=1), clock=lambda: time.time() - 60) as crashed:
        crashed.begin(Wish("invoice 19", "key-19", Outgoing("POST", url, (), b"{}"), DAY, 60), b"dead")
    assert semel("journal", "resume", "payments.journal").stdout.endswith("2 resumed.\n")


def test_resume_under_another_header(semel: Semel, tmp_path: Path, server: Served) -> None:
    """A key is sent in the header that it was sent in before."""
    begun = time.time() - 60
    with Journal(tmp_path / "own.journal", lease=timedelta(milliseconds=1), clock=lambda: begun) as journal:
        outgoing = Outgoing("POST", f"{server.url}/pay", (), b"{}")
        journal.begin(Wish("invoice 19", "key-19", outgoing, DAY, 60, header="X-My-Key"), b"dead")
    semel("journal", "resume", "own.journal", "--deadline", "1s")
    assert {(each.header("x-my-key"), each.key) for each in server.seen} == {("key-19", None)}


def test_resume_fails(semel: Semel, journal: Journal, server: Served) -> None:
    """What has no answer in its time stays pending, and the command fails."""
    server.outage = "lose after"
    done = semel("journal", "resume", "payments.journal", "--deadline", "1s")
    assert done.returncode == 1
    assert "RequestOutcomeUnknown" in done.stdout
    assert "1 of 1 have no answer yet" in done.stderr
    assert [entry.intent for entry in journal.pending()] == ["invoice 18"]


def test_forget(semel: Semel, journal: Journal) -> None:
    """`journal forget` removes one entry, or old ones that are done, after a question."""
    assert semel("journal", "forget", "payments.journal", "invoice 18").returncode != 0
    assert len(journal.entries()) == 2
    assert semel("journal", "forget", "payments.journal", "invoice 18", "--yes").stdout == "1 forgotten.\n"
    assert semel("journal", "forget", "payments.journal", "--done-before", "1d", "--yes").stdout == "0 forgotten.\n"
    assert semel("journal", "forget", "payments.journal", "--done-before", "1h", "--yes").stdout == "1 forgotten.\n"
    missing = semel("journal", "forget", "payments.journal", "invoice 18", "--yes")
    assert (missing.returncode, "no entry" in missing.stderr) == (1, True)


def test_mistakes(semel: Semel, journal: Journal, tmp_path: Path) -> None:
    """What is typed wrongly is told, and no file is made."""
    assert "no journal" in semel("journal", "list", "other.journal").stderr
    assert not (tmp_path / "other.journal").exists()
    assert "Which entries" in semel("journal", "forget", "payments.journal").stderr
    assert "Name: value" in semel("journal", "resume", "payments.journal", "--header", "x").stderr
    wrong = semel("journal", "resume", "payments.journal", "--header", "A: env:NOT_THERE")
    assert (wrong.returncode, "not set" in wrong.stderr) == (2, True)
    (tmp_path / "text").write_text("no database" * 100)
    assert "not a SQLite database" in semel("journal", "list", "text").stderr
