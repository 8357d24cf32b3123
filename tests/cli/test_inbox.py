"""`semel inbox list`, `show`, `requeue` and `drop`."""

import getpass
import json
import re
import shlex
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing, suppress

import pytest

from semel.cli.inbox import MessageChanged, drop, requeue
from semel.core.commands import Open, ReadTrail, Undo
from semel.core.inbox import AFTER_REQUEUE
from semel.inbox import Duplicate, Inbox, Parked, Ran
from semel.stores import Store, store
from semel.stores.dialect import messages_of
from semel.stores.inbox import InboxStatements

Semel = Callable[..., subprocess.CompletedProcess[str]]
ME = f"{getpass.getuser()}@{socket.gethostname()}"


class Boom(Exception):
    """What a handler raises."""


def fail(_connection: object) -> None:
    raise Boom("no stock")


@pytest.fixture(params=["sqlite_url", "postgres_url"])
def url(request: pytest.FixtureRequest) -> str:
    """A store with a parked message, two that fail, and one that was handled."""
    found: str = request.getfixturevalue(request.param)
    with closing(store(found)) as opened:
        opened.migrate()
        receive(opened, "billing", "parked", fail, fail)
        receive(opened, "billing", "shared", fail)
        receive(opened, "shipping", "shared", fail)
        receive(opened, "billing", "handled", lambda _: None)
    return found


@pytest.fixture
def opened(url: str) -> Iterator[Store]:
    with closing(store(url)) as made:
        yield made


def receive(opened: Store, consumer: str, message: str, *handlers: Callable[..., object]) -> None:
    inbox = Inbox(opened, consumer=consumer, max_attempts=2)
    for handler in handlers:
        with suppress(Boom):
            inbox.receive(message, handler, payload=b"{}")


def trail(opened: Store, message: str) -> list[tuple[str, str, int]]:
    lines = opened.perform(ReadTrail("inbox:billing", message))
    return [(line.event, line.actor, line.attempt) for line in lines]


def test_list(url: str, semel: Semel) -> None:
    """What has failed is listed, the last changed first, with its consumer, its tries and its error."""
    said = semel("inbox", "list", "--store", url)
    assert said.returncode == 0, said.stderr
    head, *rows = said.stdout.splitlines()
    assert head.split() == ["message", "consumer", "state", "tries", "last", "error"]
    assert [row.split()[:4] for row in rows] == [
        ["shared", "shipping", "failing", "1"],
        ["shared", "billing", "failing", "1"],
        ["parked", "billing", "parked", "2"],
    ]
    assert all(row.endswith("Boom: no stock") for row in rows)


def test_list_can_be_filtered(url: str, semel: Semel) -> None:
    """By consumer, by state, and as JSON."""
    listed = json.loads(semel("inbox", "list", "--consumer", "billing", "--json", SEMEL_STORE=url).stdout)
    assert [each["message"] for each in listed] == ["shared", "parked"]
    (parked,) = json.loads(semel("inbox", "list", "--state", "parked", "--json", SEMEL_STORE=url).stdout)
    assert (parked["state"], parked["attempts"], parked["error"]) == ("parked", 2, "Boom: no stock")
    assert semel("inbox", "list", "--consumer", "nothing", SEMEL_STORE=url).stdout == "No messages.\n"


def test_show(url: str, semel: Semel) -> None:
    """One message, with the digest of its payload; its consumer is needed where several have it."""
    said = semel("inbox", "show", "parked", "--store", url)
    for each in ("parked", "billing", "failed tries", "Boom: no stock", "digest"):
        assert each in said.stdout
    (requeue,) = [each for each in said.stdout.splitlines() if "semel inbox requeue" in each]
    assert shlex.split(requeue) == ["semel", "inbox", "requeue", "parked", "--consumer", "billing"]
    again = semel("inbox", "show", "parked", "--consumer", r"\x62illing", "--store", url)
    first, second = (re.sub(r"\d+s ago", "", each.stdout) for each in (said, again))
    assert first == second
    several = semel("inbox", "show", "shared", "--store", url)
    assert several.returncode != 0
    assert "--consumer: billing, shipping" in several.stderr
    one = json.loads(semel("inbox", "show", "shared", "--consumer", "shipping", "--json", "--store", url).stdout)
    assert (one["consumer"], one["state"], one["trail"]) == ("shipping", "failing", [])
    missing = semel("inbox", "show", "nothing", "--store", url)
    assert (missing.returncode, "no message nothing" in missing.stderr) == (1, True)


def test_requeue(url: str, semel: Semel, opened: Store) -> None:
    """A parked message is handled by its next delivery, and may fail as often as a new one; the trail has it."""
    inbox = Inbox(opened, consumer="billing", max_attempts=2)
    assert inbox.receive("parked", lambda _: 7) == Parked(2, "Boom: no stock")
    said = semel("inbox", "requeue", "parked", "--yes", "--store", url)
    assert AFTER_REQUEUE in said.stdout
    assert (said.returncode, said.stdout.splitlines()[-1]) == (0, "Requeued."), said.stderr
    with pytest.raises(Boom):
        inbox.receive("parked", fail)
    assert inbox.receive("parked", lambda _: 7) == Ran(7)
    assert trail(opened, "parked") == [("requeued", ME, 2)]
    assert "requeued" in semel("inbox", "show", "parked", "--store", url).stdout


def test_drop(url: str, semel: Semel, opened: Store) -> None:
    """A dropped message is never handled: its deliveries are duplicates, and it is listed no more."""
    assert semel("inbox", "drop", "shared", "--consumer", "billing", "--yes", "--store", url).returncode == 0
    inbox = Inbox(opened, consumer="billing")
    assert inbox.receive("shared", lambda _: 7) == Duplicate()
    listed = json.loads(semel("inbox", "list", "--json", "--store", url).stdout)
    assert [(each["message"], each["consumer"]) for each in listed] == [("shared", "shipping"), ("parked", "billing")]
    assert trail(opened, "shared") == [("dropped", ME, 1)]


@pytest.mark.parametrize("command", ["requeue", "drop"])
def test_what_was_handled_stays_so(url: str, semel: Semel, opened: Store, command: str) -> None:
    """A message that was handled can't be changed: it would be handled twice."""
    said = semel("inbox", command, "handled", "--yes", "--store", url)
    assert said.returncode == 1
    assert "was handled, and that stays so" in said.stderr
    assert Inbox(opened, consumer="billing").receive("handled", lambda _: 7) == Duplicate()
    assert trail(opened, "handled") == []


@pytest.mark.parametrize("command", ["requeue", "drop"])
def test_not_without_a_yes(url: str, semel: Semel, opened: Store, command: str) -> None:
    """Without --yes the command asks, and without an answer it changes nothing."""
    assert semel("inbox", command, "parked", "--store", url).returncode != 0
    assert trail(opened, "parked") == []
    assert Inbox(opened, consumer="billing").receive("parked", lambda _: 7) == Parked(2, "Boom: no stock")


@pytest.mark.parametrize("command", [requeue, drop], ids=["requeue", "drop"])
def test_changed_since_it_was_shown(
    url: str, opened: Store, monkeypatch: pytest.MonkeyPatch, command: Callable[..., None]
) -> None:
    """A message that was tried again while the command asked is left alone."""
    monkeypatch.setattr("typer.confirm", lambda *_, **__: receive(opened, "billing", "shared", fail))
    with pytest.raises(MessageChanged):
        command("shared", store=url, consumer="billing")
    assert trail(opened, "shared") == []


def test_not_while_it_is_handled(postgres_url: str, semel: Semel) -> None:
    """A message that a consumer is handling just now can't be changed."""
    with closing(store(postgres_url)) as opened:
        receive(opened, "billing", "parked", fail, fail)
        transaction = opened.transaction()
        transaction.perform(Open())
        assert transaction.run(InboxStatements(messages_of(opened)).look("billing", "parked")).has_lock
        said = semel("inbox", "drop", "parked", "--yes", "--store", postgres_url)
        assert (said.returncode, "being handled just now" in said.stderr) == (1, True)
        transaction.perform(Undo())
        assert semel("inbox", "drop", "parked", "--yes", "--store", postgres_url).returncode == 0


def test_without_a_trail(tmp_path_factory: pytest.TempPathFactory, semel: Semel) -> None:
    """A store that has its audit trail off gets no line."""
    url = f"sqlite:///{tmp_path_factory.mktemp('off') / 'semel.db'}?audit=off"
    with closing(store(url)) as opened:
        opened.migrate()
        receive(opened, "billing", "parked", fail, fail)
        assert semel("inbox", "drop", "parked", "--yes", "--store", url).returncode == 0
        assert trail(opened, "parked") == []


def test_a_store_without_an_inbox(semel: Semel, redis_url: str) -> None:
    """Redis has no inbox, and the command says why."""
    said = semel("inbox", "list", "--store", redis_url)
    assert said.returncode != 0
    assert "no transaction to join" in said.stderr


def test_reap(url: str, semel: Semel) -> None:
    """`semel reap` deletes old receipts, too; what has failed stays."""
    said = semel("reap", "--inbox-retention", "1ms", "--store", url)
    assert "reaped the inbox: 1 receipts deleted" in said.stdout, said.stderr
    assert len(json.loads(semel("inbox", "list", "--json", "--store", url).stdout)) == 3
