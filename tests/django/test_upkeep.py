"""Cleaning up from ``manage.py`` and from Celery."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import timedelta
from io import StringIO
from typing import Any

import pytest
from celery import Celery, current_app
from django.core.management import CommandError, call_command
from django.db import connection
from django.test import override_settings

from semel.core.commands import Complete, Look, Note, ReadTrail
from semel.core.record import Hold
from semel.core.state import Event
from semel.core.trail import NO_KEY
from semel.django import tasks
from semel.errors import StoreNotReady
from semel.stores.django import DjangoStore
from tests.django import project
from tests.django.operations import ANSWER, claim_on

YEAR = timedelta(days=365)


@pytest.fixture
def store(database: str) -> DjangoStore:
    """A store with a record that is stuck, one that is past its retention, and one that is neither."""
    made = DjangoStore()
    old = made.perform(claim_on("old"))
    assert isinstance(old, Hold)
    made.perform(Note(old, "fenced"))
    made.perform(Complete(old, Event.COMPLETE, ANSWER))
    age(YEAR)
    made.perform(claim_on("stuck"))
    age(timedelta(hours=1))
    made.perform(claim_on("fresh"))
    return made


def age(duration: timedelta) -> None:
    """Make every record and every line of the audit trail older."""
    unit = "interval '1 second'" if connection.vendor == "postgresql" else "1000"
    seconds = int(duration.total_seconds())
    times = ("created_at", "lease_expires_at", "completed_at", "expires_at")
    back = ", ".join(f"{time} = {time} - {seconds} * {unit}" for time in times)
    with connection.cursor() as cursor:
        cursor.execute(f"UPDATE semel_keys SET {back}")
        cursor.execute(f"UPDATE semel_audit SET at = at - {seconds} * {unit}")
        if connection.vendor == "postgresql":
            cursor.execute(f"UPDATE semel_keys_watermark SET swept_to = swept_to - {seconds} * {unit}")


def said(name: str, *arguments: str) -> str:
    output = StringIO()
    call_command(name, *arguments, stdout=output)
    return output.getvalue().strip()


def stories(store: DjangoStore) -> dict[str, str]:
    """Say what the trail has last of each key, and what of the reaper."""
    trails = {key: store.perform(ReadTrail("alice", key, 9)) for key in ("stuck", "old", "fresh")}
    trails["reaper"] = store.perform(ReadTrail(NO_KEY, NO_KEY, 9))
    return {key: trail[-1].event for key, trail in trails.items() if trail}


class TestCommands:
    def test_sweep(self, store: DjangoStore) -> None:
        """``semel_sweep`` frees the keys of workers that died, and says how many."""
        assert said("semel_sweep") == "swept: 1 freed, 0 parked, 0 left to the completer"
        assert stories(store) == {"stuck": "swept", "old": "fenced"}
        assert json.loads(said("semel_sweep", "--json")) == {"freed": 0, "parked": 0, "left": 0, "error": None}

    def test_reap(self, store: DjangoStore) -> None:
        """``semel_reap`` clears away what is past its retention, and old lines of the audit trail."""
        assert said("semel_reap", "--audit-retention", "1000d", "--batch", "1").startswith("reaped: 1 deleted")
        assert stories(store) == {"old": "fenced", "reaper": "reaped"}
        assert json.loads(said("semel_reap", "--json"))["audit_lines"] > 0
        assert stories(store) == {"reaper": "reaped"}

    @pytest.mark.parametrize("wrong", [("--audit-retention", "soon"), ("--batch", "0")])
    def test_mistakes(self, store: DjangoStore, wrong: tuple[str, str]) -> None:
        """What can't be right is said in one line."""
        with pytest.raises(CommandError, match=r"soon|1 or more"):
            said("semel_reap", *wrong)

    def test_no_tables(self, sqlite_url: str) -> None:
        """A run that came to nothing is a failure, and says why."""
        with project.databases(default=sqlite_url), pytest.raises(CommandError, match=r"manage\.py migrate"):
            said("semel_sweep")

    def test_store_of_its_own(self, sqlite: str) -> None:
        """Where SEMEL names a store of its own, that is cleaned up."""
        with override_settings(SEMEL={"STORE": "memory://"}):
            assert said("semel_sweep").startswith("swept: 0 freed")

    def test_erase(self, store: DjangoStore, monkeypatch: pytest.MonkeyPatch) -> None:
        """``semel_erase`` asks, erases what has ended, and fails while something is left; the trail names no owner."""
        monkeypatch.setattr("builtins.input", lambda _: "n")
        with pytest.raises(CommandError, match="Nothing was erased"):
            said("semel_erase", "alice")
        monkeypatch.setattr("builtins.input", lambda _: "y")
        with pytest.raises(CommandError, match=r"erased: 1 operations, 1 audit lines deleted, 2 left"):
            said("semel_erase", "alice", "--reason", "ticket 7")
        record = store.perform(Look("alice", "old"))
        assert record is not None
        assert record.answer is not None
        assert record.answer.is_tombstone
        line = store.perform(ReadTrail(NO_KEY, NO_KEY, 9))[0]
        assert (line.event, line.detail) == ("erased", "ticket 7: 1 erased")
        assert "@" in line.actor
        monkeypatch.setattr("builtins.input", lambda _: pytest.fail("It asks about nothing."))
        with pytest.raises(CommandError, match="user:PRIMARY-KEY"):
            said("semel_erase", "nobody")
        facts = json.loads(said("semel_erase", "nobody", "--yes", "--json"))
        assert facts == {"erased": 0, "audit_lines": 0, "copies": None, "left": [], "error": None}
        with pytest.raises(CommandError, match="Say --yes"):
            said("semel_erase", "nobody", "--json")

    def test_erase_without_a_terminal(self, store: DjangoStore, monkeypatch: pytest.MonkeyPatch) -> None:
        """Where its question can't be answered, as in cron, it erases nothing and says which option does."""
        monkeypatch.setattr("sys.stdin", StringIO())
        with pytest.raises(CommandError, match=r"Nothing was erased\. Without a terminal, say --yes"):
            said("semel_erase", "alice")
        record = store.perform(Look("alice", "old"))
        assert record is not None
        assert record.answer == ANSWER


class TestCelery:
    def test_tasks(self, store: DjangoStore) -> None:
        """The tasks ``semel.sweep`` and ``semel.reap`` do the same, for beat."""
        current_app.finalize()
        assert {"semel.sweep", "semel.reap"} <= set(current_app.tasks)
        sweep, reap = (current_app.tasks[name] for name in ("semel.sweep", "semel.reap"))
        assert sweep.apply().get().startswith("swept: 1 freed")
        assert reap.apply(kwargs={"audit_retention": "1000d"}).get().startswith("reaped: 1 deleted")
        assert stories(store) == {"stuck": "swept", "old": "fenced", "reaper": "reaped"}
        assert store.perform(Look("alice", "old")) is None

    def test_failure(self, sqlite_url: str) -> None:
        """A run that came to nothing is a task that failed."""
        with project.databases(default=sqlite_url), pytest.raises(StoreNotReady):
            tasks.sweep()

    def test_autodiscovery(self, sqlite: str) -> None:
        """Celery finds them by itself among the installed apps."""
        app: Any = Celery("shop", set_as_current=False)
        app.autodiscover_tasks(["semel.django"], force=True)
        app.finalize()
        assert "semel.reap" in app.tasks


def test_nothing_else_imports_celery() -> None:
    """A project without Celery never meets it."""
    code = (
        "import sys; sys.modules['celery'] = None\n"
        "from tests.django import project; project.set_up()\n"
        "from django.core.checks import run_checks\n"
        "with project.databases(default='sqlite:///unused.db'): assert run_checks() == [], run_checks()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=project.ROOT)


def test_importing_touches_nothing() -> None:
    """``import semel.django`` works before Django is set up, and imports nothing of it."""
    code = "import semel.django, sys; assert not any(each.split('.')[0] == 'django' for each in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=project.ROOT)
