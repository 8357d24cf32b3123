"""What is left in a database's files after one owner was erased: nothing, once the files were written anew."""

import os
import re
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import psycopg
import pytest

from semel.core.commands import Claim, Complete, Mark, Note, Save
from semel.core.message import Answer, Head, Request
from semel.core.record import Hold, Milestone
from semel.core.recovery import Done, Progress
from semel.core.state import Event
from semel.flows.erase import EraseReport, erase
from semel.guard.running import run
from semel.stores import Store, store
from semel.stores.migration import Layout
from semel.work.service import ServicePorts

PAGE = (Path(__file__).parents[3] / "docs" / "how-to" / "erase-a-customer.md").read_text()

CANARY = "canary-5e1f-of-acme"
DAY = timedelta(days=1)
#: Kept in rows of their own, or on pages of their own, where they can't be compressed.
LARGE = CANARY.encode() + os.urandom(20_000)


def fill(keys: Store, scope: str, word: str) -> None:
    """Store *word* in every place that has content: twice, with a small body and a large one; and leave lines."""
    request = Request(Head("POST", f"/{word}", word.encode(), ((b"x-word", word.encode()),)), word.encode(), scope)
    for key, body in (("small", word.encode()), ("large", LARGE.replace(CANARY.encode(), word.encode()))):
        claim = Claim(scope, key, os.urandom(16), b"\x0a" * 32, DAY, DAY, request=request)
        hold = keys.perform(replace(claim, request_line=f"POST /{word}"))
        assert isinstance(hold, Hold)
        keys.perform(Save(hold, Progress((Done("phase", "ride_created", word),))))
        keys.perform(Mark(hold, Milestone(0.4, word)))
        keys.perform(Note(hold, "said", word))
        keys.perform(Complete(hold, Event.COMPLETE, Answer(201, ((b"location", word.encode()),), body)))


def erased(keys: Store) -> EraseReport:
    return run(erase, ServicePorts(keys), "acme")


def is_there(files: Callable[[], list[Path]], word: str = CANARY) -> bool:
    return any(word.encode() in file.read_bytes() for file in files())


def test_sqlite(sqlite_url: str, tmp_path: Path) -> None:
    """In a SQLite file, VACUUM and a checkpoint remove what was erased from the file and its log."""

    def files() -> list[Path]:
        return list(tmp_path.glob("semel.db*"))

    with closing(store(sqlite_url)) as keys:
        keys.migrate()
        fill(keys, "acme", CANARY)
        fill(keys, "globex", "another")
        assert is_there(files)
        assert (report := erased(keys)).erased == 2
        assert report.audit_lines == 4
        assert is_there(files)  # in free pages, and in the log
        with closing(sqlite3.connect(tmp_path / "semel.db")) as connection:
            connection.execute("VACUUM")
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        assert not is_there(files)
        assert is_there(files, "another")


@pytest.mark.parametrize("layout", ["plain", "partitioned"])
def test_postgresql(migrated_postgres_url: str, layout: Layout) -> None:
    """In PostgreSQL's files, the commands of the page remove it: from the tables, whatever the layout, and from what
    the planner has noted of their values. Its log, and backups, are another matter.
    """
    commands = re.findall(r"^VACUUM .+;$", PAGE, re.MULTILINE)
    with (
        closing(store(migrated_postgres_url)) as keys,
        psycopg.connect(migrated_postgres_url, autocommit=True) as connection,
    ):
        row = connection.execute(
            "SELECT current_setting('data_directory'), oid::text FROM pg_database WHERE datname = current_database()"
        ).fetchone()
        assert row is not None
        folder = Path(row[0]) / "base" / row[1]
        if not folder.is_dir():
            pytest.skip("The server's files are on another machine, or can't be read.")

        def files() -> list[Path]:
            connection.execute("CHECKPOINT")
            return [each for each in folder.iterdir() if each.is_file()]

        keys.lay_out(layout)
        fill(keys, "acme", CANARY)
        fill(keys, "globex", "another")
        connection.execute("ANALYZE")
        assert is_there(files)
        assert (report := erased(keys)).erased == 2
        assert report.audit_lines == 4
        # A plain VACUUM frees the room, but leaves bytes in it until something else is written there.
        for command in commands if layout == "partitioned" else [each for each in commands if "answers" not in each]:
            connection.execute(command.encode())
        assert not is_there(files)
        assert is_there(files, "another")
