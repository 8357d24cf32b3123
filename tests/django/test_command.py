"""``manage.py semel``: the whole command line, about the project's own database."""

import getpass
import json
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from django.core.handlers.wsgi import WSGIHandler
from django.core.management import CommandError, call_command
from django.db import connection, transaction
from django.test import override_settings

from semel.core.commands import Look, Park, ReadTrail
from semel.core.record import Hold
from semel.doctor import Finding, Verdict, examine
from semel.outbox import Outbox
from semel.stores import store
from semel.stores.django import DjangoStore
from tests.django import project
from tests.django.operations import claim_on


@pytest.fixture
def keys(database: str) -> DjangoStore:
    """A store with a parked operation."""
    made = DjangoStore()
    hold = made.perform(claim_on("parked"))
    assert isinstance(hold, Hold)
    made.perform(Park(hold))
    return made


def said(capsys: pytest.CaptureFixture[str], *typed: str) -> str:
    call_command("semel", *typed)
    return capsys.readouterr().out


def test_keys(keys: DjangoStore, capsys: pytest.CaptureFixture[str]) -> None:
    """Keys are listed, shown and resolved without a URL, and what is said to be typed next is typed here."""
    (facts,) = json.loads(said(capsys, "keys", "list", "--json"))
    assert (facts["key"], facts["state"]) == ("parked", "unknown")
    assert "  python manage.py semel keys resolve parked" in said(capsys, "keys", "show", "parked")
    assert said(capsys, "keys", "resolve", "parked", "--applied", "1", "--yes").endswith("Resolved.\n")
    record = keys.perform(Look("alice", "parked"))
    assert record is not None
    assert record.answer is not None
    actors = {line.actor for line in keys.perform(ReadTrail("alice", "parked")) if line.event == "applied"}
    assert actors == {f"{getpass.getuser()}@{socket.gethostname()}"}


def test_services(keys: DjangoStore, capsys: pytest.CaptureFixture[str]) -> None:
    """The services run once over Django's connections, the relay on an event loop, too."""
    with transaction.atomic():
        Outbox(keys).add(connection, "order.paid", {"id": 7}, to="events")
    assert said(capsys, "sweep") == "swept: 0 freed, 0 parked, 0 left to the completer\n"
    assert said(capsys, "relay", "--to", "events=discard://", "--once").startswith("relayed to events: 1 sent")
    assert said(capsys, "outbox", "list") == "No messages.\n"


def test_a_store_of_its_own(keys: DjangoStore, sqlite_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Where SEMEL has a STORE, that one is meant; and where a store is typed, the typed one."""
    del keys
    with store(sqlite_url) as other:
        other.migrate()
    assert said(capsys, "keys", "list", "--store", sqlite_url) == "No keys.\n"
    with override_settings(SEMEL={"STORE": sqlite_url}):
        assert said(capsys, "keys", "list") == "No keys.\n"


def test_statuses(keys: DjangoStore, capsys: pytest.CaptureFixture[str]) -> None:
    """It ends with the status of the command, and with one line where that failed."""
    del keys
    for typed, status in (["keys", "show", "absent"], 1), (["keys", "lst"], 2), (["migrate"], 2):
        with pytest.raises(SystemExit) as ended:
            call_command("semel", *typed)
        assert ended.value.code == status
    assert "python manage.py migrate semel" in capsys.readouterr().err
    with pytest.raises(CommandError):
        call_command("semel", "--nonsense")


def test_settings_at_the_end(keys: DjangoStore, capsys: pytest.CaptureFixture[str]) -> None:
    """Django's own options may stand at the end, as with its other commands."""
    del keys
    assert "parked" in said(capsys, "keys", "list", "--settings=shop.settings", "--pythonpath", ".")


def test_a_missing_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the extra is missing, one line says how to install it."""
    for name in [each for each in sys.modules if each.startswith("semel.cli.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("semel.cli.address", raising=False)
    monkeypatch.setitem(sys.modules, "typer", None)
    with pytest.raises(CommandError, match=r"pip install 'semel\[cli\]'"):
        call_command("semel", "keys", "list")


def finding(name: str) -> Finding:
    report = examine(app=WSGIHandler(), only=[name])
    return next(each for each in report.findings if each.check.name == name)


def test_doctor(keys: DjangoStore, capsys: pytest.CaptureFixture[str]) -> None:
    """The doctor examines Django's own database, over a connection as Django makes it."""
    del keys
    kind = "postgres" if connection.vendor == "postgresql" else "sqlite"
    name = str(connection.settings_dict["NAME"]).rpartition("/")[2]
    for each in (f"{kind}-tables", f"{kind}-schema", "app-same-store"):
        assert finding(each).verdict is Verdict.OK, finding(each)
    assert name in finding("app-same-store").evidence
    parked = finding("store-parked")
    assert (parked.verdict, parked.evidence.startswith("1")) == (Verdict.WRONG, True)
    with pytest.raises(SystemExit):
        call_command("semel", "doctor", "--only", "store-parked", "--fail-on", "warning")
    assert "warning store-parked" in capsys.readouterr().out


WSGI = """
from django.core.handlers.wsgi import WSGIHandler
from semel.stores.django import DjangoStore
from semel.wsgi import IdempotencyMiddleware

user_of = lambda request: request.headers.get("x-user")
application = IdempotencyMiddleware(WSGIHandler(), store=DjangoStore(), scope=user_of)
"""


def test_doctor_of_what_is_around_django(
    keys: DjangoStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The doctor sees the guard that is around Django in the module of WSGI_APPLICATION; a module that can't be
    imported ends it with one line.
    """
    del keys
    (tmp_path / "wsgi_of_ours.py").write_text(WSGI)
    (tmp_path / "wsgi_without_settings.py").write_text("raise KeyError('SHOP_SECRET')")
    monkeypatch.syspath_prepend(tmp_path)
    with override_settings(WSGI_APPLICATION="wsgi_of_ours.application"):
        assert "2: IdempotencyMiddleware, SEMEL." in said(capsys, "doctor", "--only", "app-guard")
    with override_settings(WSGI_APPLICATION="wsgi_without_settings.application"), pytest.raises(SystemExit) as ended:
        call_command("semel", "doctor", "--only", "app-guard")
    assert ended.value.code == 3
    assert "wsgi_without_settings can't be imported: KeyError: 'SHOP_SECRET'" in capsys.readouterr().err


def test_doctor_without_a_database() -> None:
    """A database that can't keep records is an error of the settings, and no end of the examination."""
    assert finding("app-django").verdict is Verdict.WRONG
    assert "Name a PostgreSQL or SQLite one" in finding("app-django").evidence


@pytest.mark.parametrize("empty", ["sqlite_url", "empty_postgres_url"])
def test_doctor_without_tables(request: pytest.FixtureRequest, empty: str) -> None:
    """Where tables are missing, the doctor says the command that makes them in Django."""
    url: Any = request.getfixturevalue(empty)
    with project.databases(default=url):
        connection.ensure_connection()
        kind = "postgres" if connection.vendor == "postgresql" else "sqlite"
        found = finding(f"{kind}-tables")
    assert (found.verdict, found.mend) == (Verdict.WRONG, "python manage.py migrate semel --database=default")
