"""Guarded Flask apps in real servers: forked workers, killed workers, and those that are told to stop."""

import os
import signal
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psycopg
import pytest

from semel import stores
from tests.web import serving
from tests.web.harness import HANG_SECONDS, wait_until
from tests.web.serving import Backstage, seen

HELD = '{"hold": true}'
TABLE = {
    "sqlite": "CREATE TABLE payments (id INTEGER PRIMARY KEY, note TEXT NOT NULL)",
    "postgresql": "CREATE TABLE payments (id SERIAL PRIMARY KEY, note TEXT NOT NULL)",
}

COMMANDS = {
    "preload": ("--preload", "--workers", "2"),
    "threads": ("--workers", "1", "--threads", "4"),
}


@pytest.fixture(params=["sqlite", "postgres"])
def stage(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], Backstage]]:
    """Set a stage for the app of ``served.py``, on either database."""
    opened: list[Backstage] = []
    for kind, options in COMMANDS.items():
        command = ("gunicorn", "tests.flask.served:app", "--bind", "127.0.0.1:{port}", *options)
        monkeypatch.setitem(serving.COMMANDS, kind, command)

    def set_stage(mode: str = "atomic") -> Backstage:
        url: str = request.getfixturevalue(f"{request.param}_url")
        run(url, TABLE[urlsplit(url).scheme])
        store = stores.store(url)
        store.migrate()
        store.close()
        opened.append(Backstage(tmp_path, url, mode=mode))
        return opened[-1]

    yield set_stage
    for backstage in opened:
        backstage.close()


def run(url: str, statement: str) -> list[tuple[object, ...]]:
    """Run a statement on a connection of its own."""
    if url.startswith("sqlite"):
        connection = sqlite3.connect(urlsplit(url).path)
        try:
            with connection:
                return connection.execute(statement).fetchall()
        finally:
            connection.close()
    with psycopg.connect(url) as postgres:
        cursor = postgres.execute(statement.encode())
        return cursor.fetchall() if cursor.description else []


def notes(backstage: Backstage) -> list[tuple[object, ...]]:
    return run(backstage.store, "SELECT note FROM payments ORDER BY id")


def test_forked_workers(stage: Callable[[str], Backstage]) -> None:
    """An app that is loaded before its workers are forked serves in each of them, and SIGTERM ends it all."""
    backstage = stage("atomic")
    server = backstage.serve("preload")
    for number in range(6):
        first, again = (server.pay(f"key-{number}") for _ in range(2))
        assert (seen(first), seen(again)) == ((201, False), (201, True)), server.log.read_text()
        assert first.content == again.content
    assert notes(backstage) == [(f"key-{number}",) for number in range(6)]
    assert server.stop() in {0, -signal.SIGTERM}
    assert "Traceback" not in server.log.read_text()


def test_a_worker_killed_between_its_row_and_its_answer(stage: Callable[[str], Backstage]) -> None:
    """After db.session.commit() and before the answer, kill -9: the row is gone with it, and a retry leaves one."""
    backstage = stage("atomic")
    doomed, heir = backstage.serve("threads"), backstage.serve("threads")
    lost = doomed.start_paying(body=HELD)
    wait_until(lambda: len(backstage.effects) == 1)
    assert notes(backstage) == []
    os.kill(backstage.effects[0].pid, signal.SIGKILL)
    with pytest.raises(httpx.TransportError):
        lost.result(HANG_SECONDS)
    backstage.let_go()
    answers: list[httpx.Response] = []

    def is_done() -> bool:
        answers.append(heir.pay(body=HELD))
        return answers[-1].status_code != 409

    wait_until(is_done)  # The database may take a moment to notice.
    assert seen(answers[-1]) == (201, False)
    assert seen(heir.pay(body=HELD)) == (201, True)
    assert notes(backstage) == [("key-1",)]


def test_a_server_that_stops_ends_what_it_has_begun(stage: Callable[[str], Backstage]) -> None:
    """SIGTERM while a view runs: its answer still comes and is kept, in guard mode as in atomic mode."""
    backstage = stage("guard")
    server, heir = backstage.serve("threads"), backstage.serve("threads")
    running = server.start_paying(body=HELD)
    wait_until(lambda: len(backstage.effects) == 1)
    server.process.terminate()
    backstage.let_go()
    assert seen(running.result(HANG_SECONDS)) == (201, False)
    assert server.process.wait(HANG_SECONDS) in {0, -signal.SIGTERM}
    assert seen(heir.pay(body=HELD)) == (201, True)
    assert notes(backstage) == [("key-1",)]
