"""`semel outbox` and `semel relay`."""

import asyncio
import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest

from semel.cli.outbox import MessageChanged, drop, requeue
from semel.core.outbox import Delivered, Message, Rejected, Verdict
from semel.core.webhook import new_secret
from semel.outbox import Outbox
from semel.publishers.discard import Discard
from semel.stores import store
from semel.webhooks import Endpoints
from semel.work.relay import Relay
from tests.webhooks.endpoint import http, serving

Semel = Callable[..., subprocess.CompletedProcess[str]]


class Picky(Discard):
    """Takes all but the second."""

    async def publish(self, messages: Any) -> list[Verdict]:
        return [self._judged(message) for message in messages]

    def _judged(self, message: Message) -> Verdict:
        return Rejected("no such queue") if message.payload == b"2" else Delivered()


def connect(url: str) -> Any:
    return sqlite3.connect(urlsplit(url).path[1:]) if url.startswith("sqlite") else psycopg.connect(url)


@pytest.fixture(params=["sqlite_url", "postgres_url"])
def url(request: pytest.FixtureRequest) -> str:
    """A store with a dead letter, one behind it, and one to another destination."""
    return prepared(request.getfixturevalue(request.param))


def prepared(found: str) -> str:
    with closing(store(found)) as keys:
        keys.migrate()
        with closing(connect(found)) as connection:
            for number in (1, 2, 3):
                Outbox(found).add(connection, "order.paid", number, key="order-17", headers={"tenant": "acme"})
            Outbox(found).add(connection, "mail.wanted", {"to": "ann"}, to="mail")
            connection.commit()
        with closing(Relay(keys, "events", Picky("events", ""))) as relay:
            report = relay.run_once()
        assert (report.sent, report.dead) == (1, 1)
    return found


@pytest.fixture
def sqlite_dead(sqlite_url: str) -> str:
    """The same in a file."""
    return prepared(sqlite_url)


def listed(semel: Semel, url: str, *more: str) -> list[dict[str, Any]]:
    done = semel("outbox", "list", "--store", url, "--json", *more)
    assert done.returncode == 0, done.stderr
    facts: list[dict[str, Any]] = json.loads(done.stdout)
    return facts


def test_list(url: str, semel: Semel) -> None:
    """Dead letters come first, with what was wrong; a list can be of one state or one destination."""
    assert [(each["state"], each["to"]) for each in listed(semel, url)] == [
        ("dead", "events"),
        ("ready", "events"),
        ("ready", "mail"),
    ]
    assert [each["to"] for each in listed(semel, url, "--to", "mail")] == ["mail"]
    assert listed(semel, url, "--state", "sent") == []
    shown = semel("outbox", "list", "--store", url, "--state", "dead").stdout.splitlines()
    assert shown[0].split() == ["id", "to", "type", "key", "state", "tries", "age", "error"]
    assert "no such queue" in shown[1]
    assert semel("outbox", "list", "--store", url, "--to", "nowhere").stdout == "No messages.\n"


def test_show(url: str, semel: Semel) -> None:
    """Everything about one message, what happened to it, and what to type next."""
    (dead,) = listed(semel, url, "--state", "dead")
    shown = semel("outbox", "show", dead["id"], "--store", url).stdout
    for word in ("order-17", "no such queue", "tenant: acme", f"semel outbox requeue {dead['id']}", "dead by"):
        assert word in shown
    assert semel("outbox", "show", dead["id"], "--store", url, "--body").stdout.endswith("2\n")
    facts = json.loads(semel("outbox", "show", dead["id"], "--store", url, "--json", "--body").stdout)
    assert (facts["payload"], facts["attempts"], facts["trail"][0]["event"]) == ("2", 1, "dead")


def test_requeue(url: str, semel: Semel) -> None:
    """A dead letter gets another series of tries; the trail has a line with the operator's name."""
    (dead,) = listed(semel, url, "--state", "dead")
    assert semel("outbox", "requeue", dead["id"], "--store", url).stdout == "1 requeued.\n"
    again = semel("outbox", "requeue", dead["id"], "--store", url)
    assert again.returncode != 0
    assert "is not a dead letter" in again.stderr
    facts = json.loads(semel("outbox", "show", dead["id"], "--store", url, "--json").stdout)
    assert [each["event"] for each in facts["trail"]] == ["dead", "requeued"]
    assert semel("relay", "--store", url, "--to", "events=discard://", "--once").stdout.startswith(
        "relayed to events: 2 sent"
    )


@pytest.mark.parametrize("which", [["--to", "events"], ["--since", "1h"], ["--all"]], ids=["to", "since", "all"])
def test_requeue_many(url: str, semel: Semel, which: list[str]) -> None:
    """They can be named by their destination, by when they died, or all at once."""
    assert semel("outbox", "requeue", *which, "--store", url).stdout == "1 requeued.\n"
    assert semel("outbox", "requeue", "--to", "mail", "--store", url).stdout == "0 requeued.\n"


DIES_AGAIN = {
    "sqlite": """CREATE TRIGGER dies_again AFTER UPDATE ON semel_outbox WHEN new.state = 'waiting' BEGIN
                     UPDATE semel_outbox SET state = 'dead', ended_at = (SELECT now FROM semel_keys_clock)
                      WHERE seq = new.seq; END""",
    "postgresql": """CREATE FUNCTION dies_again() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
                         new.state := 'dead'; new.ended_at := clock_timestamp(); RETURN new; END $$;
                     CREATE TRIGGER dies_again BEFORE UPDATE ON semel_outbox FOR EACH ROW
                       WHEN (new.state = 'waiting') EXECUTE FUNCTION dies_again()""",
}


def test_requeue_what_dies_again(url: str, semel: Semel) -> None:
    """Each dead letter is requeued once, though a relay makes it one again at once; a trigger stands in for it."""
    with closing(connect(url)) as connection:
        connection.execute(DIES_AGAIN[url.partition(":")[0]])
        connection.commit()
    assert semel("outbox", "requeue", "--all", "--store", url).stdout == "1 requeued.\n"


def test_drop(url: str, semel: Semel) -> None:
    """A dead letter is deleted for good, after a question; the trail keeps a line, and the rest of its key goes on."""
    (dead,) = listed(semel, url, "--state", "dead")
    assert semel("outbox", "drop", dead["id"], "--store", url).returncode != 0
    assert semel("outbox", "drop", dead["id"], "--yes", "--store", url).stdout == "1 dropped.\n"
    assert [each["state"] for each in listed(semel, url)] == ["ready", "ready"]
    with closing(connect(url)) as connection:
        assert connection.execute("SELECT event FROM semel_audit ORDER BY id").fetchall() == [("dead",), ("dropped",)]


def die_again(url: str) -> None:
    """Try the dead letter again, without success, as a relay does after another operator has requeued it."""
    with closing(store(url)) as keys, closing(Relay(keys, "events", Picky("events", ""))) as relay:
        requeue(everything=True, store=url)
        assert relay.run_once().dead == 1


@pytest.mark.parametrize("by_id", [True, False], ids=["id", "all"])
def test_drop_what_has_changed(
    url: str, semel: Semel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *, by_id: bool
) -> None:
    """A dead letter that was requeued, and has died again, while the command asked is left alone."""
    (dead,) = listed(semel, url, "--state", "dead")
    monkeypatch.setattr("typer.confirm", lambda *_, **__: die_again(url))
    if by_id:
        with pytest.raises(MessageChanged):
            drop(dead["id"], store=url)
        assert "no such queue" in capsys.readouterr().out
    else:
        drop(everything=True, store=url)
        assert capsys.readouterr().out.endswith("0 dropped.\n")
    assert [each["id"] for each in listed(semel, url, "--state", "dead")] == [dead["id"]]


@pytest.mark.parametrize(
    "typed, said",
    [
        (["outbox", "show", "17"], "is not the id of a message"),
        (["outbox", "requeue"], "Which dead letters?"),
        (["outbox", "requeue", "01a1eccf-420c-77f0-b84e-7f5fbde78caf", "--all"], "Give an ID, or"),
        (["outbox", "show", "01a1eccf-420c-77f0-b84e-7f5fbde78caf"], "There is no message"),
        (["relay"], "Where to?"),
        (["relay", "--to", "events"], "--to is NAME=URL"),
        (["relay", "--to", "events=pigeon://x"], "no publisher is known for pigeon://"),
        (["relay", "--to", "a=discard://", "--to", "a=discard://"], "given twice"),
        (["relay", "--to", "events=discard://", "--lease", "soon"], "is not a duration"),
        (["relay", "--to", "events=discard://", "--once", "--keep", ""], "is not a duration"),
    ],
    ids=["id", "which", "both", "missing", "where", "name", "scheme", "twice", "lease", "keep"],
)
def test_wrong(sqlite_url: str, semel: Semel, typed: list[str], said: str) -> None:
    """What is typed wrongly is explained in one line."""
    with closing(store(sqlite_url)) as keys:
        keys.migrate()
    done = semel(*typed, "--store", sqlite_url)
    assert done.returncode != 0
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", [["requeue"], ["drop", "--yes"]], ids=["requeue", "drop"])
@pytest.mark.parametrize(
    "which",
    [[""], ["--to", ""], ["--to", "events", "--since", ""], ["--all", "--to", ""]],
    ids=["id", "to", "since", "all"],
)
def test_an_empty_text_is_no_wildcard(sqlite_dead: str, semel: Semel, command: list[str], which: list[str]) -> None:
    """A variable that is not set in a script names no dead letters: they stay."""
    done = semel("outbox", *command, *which, "--store", sqlite_dead)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert [each["state"] for each in listed(semel, sqlite_dead, "--state", "dead")] == ["dead"]


async def test_the_url_of_a_webhook_is_not_logged(url: str, semel: Semel) -> None:
    """The log names the destination, and never has the URL of an endpoint, which may have a secret in it."""
    async with serving(lambda _: http(500)) as server:
        to = f"mail={server.url()}?token=hush#secret=env:HOOK_SECRET&private=allow"
        command = ("relay", "--to", to, "--store", url, "--once")
        done = await asyncio.to_thread(partial(semel, *command, HOOK_SECRET=new_secret(bytes(32))))
        assert [each.line.split()[1] for each in server.requests] == ["/hooks?token=hush"]
    assert done.stdout.startswith("relayed to mail: 0 sent, 1 to be tried again")
    assert "hush" not in done.stdout + done.stderr


async def test_webhooks_once(url: str, semel: Semel) -> None:
    """`semel relay --webhooks --once` sends what waits for the endpoints, and ends. What may not be sent into the own
    network waits, and loses no try; the log says what to type.
    """
    with closing(store(url)) as keys, closing(connect(url)) as connection:
        Outbox(url, to="acme").add(connection, "t", 1)
        connection.commit()
        async with serving() as server:
            Endpoints(keys).add("acme", server.url(), secrets=["env:HOOK_SECRET"])

            def relay(*typed: str) -> Any:
                command = ("relay", "--webhooks", "--once", *typed, "--store", url)
                return semel(*command, HOOK_SECRET=new_secret(bytes(32)))

            refused = await asyncio.to_thread(relay)
            assert (refused.returncode, len(server.requests)) == (2, 0)
            assert "WARNING acme can't be reached" in refused.stderr
            assert "semel relay --webhooks --allow-private" in refused.stderr
            (waits,) = [each for each in listed(semel, url) if each["to"] == "acme"]
            assert (waits["state"], waits["attempts"]) == ("ready", 0)
            sent = await asyncio.to_thread(relay, "--allow-private")
            assert sent.stdout == "webhooks: 1 sent, 0 to be tried again, 0 dead, 0 of 1 endpoints not reached\n"
            assert (sent.returncode, len(server.requests)) == (0, 1)


def test_a_destination_that_no_relay_serves(url: str, semel: Semel) -> None:
    """A message that is ready for long, and of whose destination nothing was tried, says what to type; a name that is
    nearly an endpoint's is told.
    """
    with closing(store(url)) as keys, closing(connect(url)) as connection:
        Endpoints(keys).add("acme", "https://acme.example/", secrets=["env:HOOK_SECRET"])
        Outbox(url, to="acmee").add(connection, "t", 1)
        Outbox(url, to="acme").add(connection, "t", 2)
        connection.commit()
        assert {each["hint"] for each in listed(semel, url)} == {None}
        connection.execute(_AGED[url.partition(":")[0]])
        connection.commit()
        hints = {each["to"]: each["hint"] for each in listed(semel, url)}
        assert hints["events"] is None
        assert "semel relay --to mail=URL" in hints["mail"]
        assert "semel relay --to acmee=URL (There is an endpoint acme: was that meant?)" in hints["acmee"]
        assert "semel relay --webhooks" in hints["acme"]
        Endpoints(keys).disable("acme", "moved")
    (waits,) = [each for each in listed(semel, url) if each["to"] == "acme"]
    assert "semel webhooks enable acme" in waits["hint"]
    assert "semel webhooks enable acme" in semel("outbox", "show", waits["id"], "--store", url).stdout
    assert "--to acmee=URL" in " ".join(semel("outbox", "list", "--store", url, COLUMNS="400").stdout.split())


_AGED = {
    "postgresql": "UPDATE semel_outbox SET created_at = created_at - interval '2 minutes'",
    "sqlite": "UPDATE semel_outbox SET created_at = created_at - 120000",
}


def test_no_outbox(semel: Semel) -> None:
    """Redis as a store has no outbox, and says why."""
    done = semel("relay", "--to", "events=discard://", "--store", "redis://127.0.0.1:1/0")
    assert "has no outbox, since it has no transaction to join" in done.stderr


def test_no_table(empty_postgres_url: str, semel: Semel) -> None:
    """Without the tables, the command that makes them is named."""
    done = semel("relay", "--to", "events=discard://", "--store", empty_postgres_url, "--once")
    assert done.returncode != 0
    assert "semel migrate" in done.stderr


@pytest.mark.parametrize("command", [["relay"], ["work"]], ids=["relay", "work"])
def test_until_it_is_stopped(url: str, tmp_path: Path, command: list[str]) -> None:
    """`semel relay`, and `semel work --to`, send until SIGTERM, and then end in order."""
    typed = [sys.executable, "-m", "semel", *command, "--to", "mail=discard://", "--store", url, "--lease", "1s"]
    environment = {name: value for name, value in os.environ.items() if name != "SEMEL_STORE"}
    with subprocess.Popen(typed, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "mail" in process.stdout.readline()
        with closing(connect(url)) as connection:
            while connection.execute("SELECT count(*) FROM semel_outbox WHERE aggregatetype = 'mail'").fetchall() != [
                (0,)
            ]:
                connection.rollback()
        process.send_signal(signal.SIGTERM)
        assert "SIGTERM" in process.stdout.read()
        assert process.wait(30) == 0


def test_without_permission(semel: Semel, postgres_url: str) -> None:
    """A role that may not see the table is told which one it is, and where the grants of each role are written."""
    with psycopg.connect(postgres_url, autocommit=True) as admin:
        admin.execute("CREATE ROLE semel_stranger")
        try:
            refused = semel("outbox", "list", "--store", postgres_url, PGOPTIONS="-c role=semel_stranger")
        finally:
            admin.execute("DROP ROLE semel_stranger")
    assert refused.returncode == 1
    assert "permission denied for table semel_outbox. What a role needs" in refused.stderr
    assert refused.stderr.endswith("docs/how-to/postgresql.md, Roles.\n")
