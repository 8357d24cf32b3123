"""`semel webhooks`."""

import getpass
import json
import re
import shlex
import socket
import subprocess
from base64 import b64decode
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta

import pytest
import standardwebhooks

from semel.core.commands import ReadTrail
from semel.core.text import pasteable
from semel.core.webhook import PrivateKey, read_secret
from semel.stores import store
from semel.stores.transaction import at_once
from semel.webhooks import Endpoints
from tests.cli.test_outbox import connect

Semel = Callable[..., subprocess.CompletedProcess[str]]
HOOK = "https://acme.example/hooks"


@pytest.fixture(params=["sqlite_url", "postgres_url"])
def url(request: pytest.FixtureRequest) -> str:
    """A store with its tables."""
    found: str = request.getfixturevalue(request.param)
    with store(found):
        pass
    return found


def test_endpoints(semel: Semel, url: str) -> None:
    """An endpoint is added, shown, turned off and on, and removed."""
    assert semel("webhooks", "list", SEMEL_STORE=url).stdout == "No endpoints.\n"
    added = semel("webhooks", "add", "acme", HOOK, "--secret", "env:NEW", "--secret", "file:/run/old", SEMEL_STORE=url)
    assert (added.returncode, added.stderr) == (0, "")
    header, row = semel("webhooks", "list", SEMEL_STORE=url).stdout.splitlines()
    assert re.split(r" {2,}", header) == ["name", "state", "failing", "url", "secrets", "reason"]
    assert re.split(r" {2,}", row) == ["acme", "on", "-", HOOK, "env:NEW, file:/run/old"]
    semel("webhooks", "disable", "acme", "--reason", "on \x1b[31mholiday", SEMEL_STORE=url)
    (facts,) = json.loads(semel("webhooks", "list", "--json", SEMEL_STORE=url).stdout)
    assert (facts["name"], facts["state"], facts["failing_since"]) == ("acme", "off", None)
    assert "\x1b" not in semel("webhooks", "list", SEMEL_STORE=url).stdout
    assert semel("webhooks", "enable", "acme", SEMEL_STORE=url).stdout == "acme is on.\n"
    with store(url) as keys:
        lines = keys.perform(ReadTrail("webhook:acme", HOOK))
    who = f"{getpass.getuser()}@{socket.gethostname()}"
    assert [(each.event, each.actor) for each in lines] == [("disabled", who), ("enabled", who)]
    assert lines[0].detail == r"on \x1b[31mholiday"
    assert semel("webhooks", "remove", "acme", SEMEL_STORE=url).stdout == "acme is removed.\n"
    assert semel("webhooks", "list", "--json", SEMEL_STORE=url).stdout == "[]\n"


@pytest.mark.parametrize("command, state", [("enable", "on"), ("disable", "off")])
def test_a_line_that_is_not_kept(semel: Semel, url: str, command: str, state: str) -> None:
    """An endpoint that is turned off, while the audit trail takes no line, is said to be off."""
    semel("webhooks", "add", "acme", HOOK, "--secret", "env:NEW", SEMEL_STORE=url)
    with closing(connect(url)) as connection:
        connection.execute("DROP TABLE semel_audit")
        connection.commit()
    done = semel("webhooks", command, "acme", SEMEL_STORE=url)
    assert done.stdout.startswith(f"acme is {state}.")
    assert "It is done, but the audit trail has no line of it" in done.stderr
    assert done.returncode == 1


def test_names_as_shown(semel: Semel, sqlite_url: str) -> None:
    """A name is given as the list and the console show it: one with a dash in front is no option."""
    endpoints = Endpoints(sqlite_url)
    for name in ("-acme", r"a\x41"):
        endpoints.add(name, HOOK, secrets=["env:A"])
        assert semel("webhooks", "disable", *shlex.split(pasteable(name)), SEMEL_STORE=sqlite_url).returncode == 0
    assert not any(each.is_on for each in endpoints.list())
    endpoints.close()
    assert r"a\\x41" in semel("webhooks", "list", SEMEL_STORE=sqlite_url).stdout


def test_failing(semel: Semel, sqlite_url: str) -> None:
    """A failing endpoint shows for how long it has been."""
    with store(sqlite_url) as kept:
        endpoints = Endpoints(kept)
        made = endpoints.add("acme", HOOK, secrets=["env:A"])
        with_failure = endpoints._statements.note_failure("acme", made.url, timedelta(days=5), "away")
        at_once(endpoints._run(with_failure))
    assert re.search(r" [0-9]+s  ", semel("webhooks", "list", "--store", sqlite_url).stdout.splitlines()[1])


def test_rotation(semel: Semel, sqlite_url: str) -> None:
    """An endpoint gets other secrets in the place of those that it has, when that is asked for."""
    first = ("webhooks", "add", "acme", HOOK, "--store", sqlite_url, "--secret")
    with store(sqlite_url):
        pass
    assert semel(*first, "env:OLD").returncode == 0
    refused = semel(*first, "env:NEW")
    assert refused.returncode == 2
    assert "--replace" in refused.stderr
    assert semel(*first, "env:NEW", "--replace").returncode == 0
    (facts,) = json.loads(semel("webhooks", "list", "--json", "--store", sqlite_url).stdout)
    assert facts["secrets"] == ["env:NEW"]


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["add", "acme", HOOK, "--secret", "whsec_c2VjcmV0"], "kept elsewhere"),
        (["add", "acme", "acme.example", "--secret", "env:A"], "https://host/path"),
        (["enable", "acme"], "There is no endpoint 'acme'"),
        (["disable", "acme"], "There is no endpoint 'acme'"),
        (["remove", "acme"], "There is no endpoint 'acme'"),
    ],
)
def test_mistakes(semel: Semel, sqlite_url: str, arguments: list[str], words: str) -> None:
    """A mistake is one line that says what to do, and repeats no secret."""
    with store(sqlite_url):
        pass
    said = semel("webhooks", *arguments, "--store", sqlite_url)
    assert said.returncode == (1 if "no endpoint" in words else 2)
    assert words in said.stderr
    assert len(said.stderr.splitlines()) == 1
    assert "c2VjcmV0" not in said.stderr


def test_secret(semel: Semel) -> None:
    """A fresh secret is one that the specification's library can use, and no two are the same."""
    made = [semel("webhooks", "secret").stdout.strip() for _ in range(2)]
    assert made[0] != made[1]
    assert len(b64decode(made[0].removeprefix("whsec_"))) == 32
    standardwebhooks.Webhook(made[0])
    read_secret(json.loads(semel("webhooks", "secret", "--json").stdout)["secret"])


def test_keys(semel: Semel) -> None:
    """A pair of keys is printed on two lines: the private one, and the public one that belongs to it."""
    private, public = semel("webhooks", "secret", "--kind", "v1a").stdout.split()
    key = read_secret(private)
    assert isinstance(key, PrivateKey)
    assert key.public.text == public
