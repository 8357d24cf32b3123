"""``--json``: each command prints one JSON document, and every time in it is written alike."""

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from semel.client import Journal
from semel.core.intent import Outgoing, Wish
from semel.stores import store
from semel.webhooks import Endpoints
from tests.cli.test_inbox import fail, receive
from tests.cli.test_keys import claim
from tests.cli.test_outbox import prepared

Semel = Callable[..., subprocess.CompletedProcess[str]]

TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00")
LISTS = ("keys", "outbox", "inbox", "webhooks", "journal")


@pytest.fixture(params=["sqlite_url", "postgres_url"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A store with something of each kind, and a journal beside it."""
    found = prepared(request.getfixturevalue(request.param))
    with closing(store(found)) as keys:
        claim(keys, "pay-17")
        receive(keys, "billing", "m-1", fail)
        Endpoints(keys).add("acme", "https://acme.example/", secrets=["env:NEW"])
    with Journal(tmp_path / "payments.journal") as journal:
        sent = Outgoing("POST", "https://acme.example/", (), b"{}")
        journal.begin(Wish("invoice 17", "key", sent, 3600.0, 60.0), b"token")
    return found


def times(facts: Any, name: str = "") -> Iterator[Any]:
    """Find what is a time, by its name."""
    if isinstance(facts, dict):
        for key, value in facts.items():
            yield from times(value, key)
    elif isinstance(facts, list):
        for each in facts:
            yield from times(each, name)
    elif facts is not None and (name in {"at", "not_after", "failing_since"} or name.endswith("_at")):
        yield facts


def test_lists(semel: Semel, url: str) -> None:
    """A list is an array of objects, empty where there is nothing; the same of one thing is an object."""
    for noun in LISTS:
        typed = (noun, "list", *(("payments.journal",) if noun == "journal" else ("--store", url)), "--json")
        listed = json.loads(semel(*typed).stdout)
        assert isinstance(listed, list), noun
        assert all(isinstance(each, dict) for each in listed)
        found = list(times(listed))
        assert len(found) > 1, noun
        assert [each for each in found if not TIME.fullmatch(each)] == [], noun
    (message, *_) = json.loads(semel("outbox", "list", "--store", url, "--json").stdout)
    for typed in ("keys", "pay-17"), ("inbox", "m-1"), ("outbox", message["id"]):
        shown = json.loads(semel(typed[0], "show", typed[1], "--store", url, "--json").stdout)
        assert isinstance(shown, dict)
        assert [each for each in times(shown) if not TIME.fullmatch(each)] == []
    assert semel("keys", "list", "--store", url, "--scope", "nobody", "--json").stdout == "[]\n"


def test_runs(semel: Semel, url: str) -> None:
    """What a run has done is one object; of several, an array."""
    assert json.loads(semel("sweep", "--store", url, "--json").stdout)["freed"] == 0
    assert json.loads(semel("reap", "--store", url, "--json").stdout)["inbox"] == {"deleted": 0, "error": None}
    to = ("--to", "events=discard://", "--to", "mail=discard://", "--once", "--json")
    assert [each["to"] for each in json.loads(semel("relay", "--store", url, *to).stdout)] == ["events", "mail"]
    done = json.loads(semel("migrate", url, "--json").stdout)
    assert done == {"applied": [], "left": [], "notes": []}


def test_first_migration(semel: Semel, sqlite_url: str) -> None:
    """What was applied is told by name."""
    done = json.loads(semel("migrate", sqlite_url, "--json").stdout)
    assert done["applied"][0] == "0001_pre_keys"
    assert (done["left"], done["notes"]) == ([], [])
