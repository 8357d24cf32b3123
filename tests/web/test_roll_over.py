"""From guard to atomic mode, and back, while requests are in flight: both kinds of worker may be at one key."""

import json
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4
from wsgiref.types import StartResponse, WSGIEnvironment

import psycopg
import pytest

import semel
from semel import Policy, stores
from semel.wsgi import IdempotencyMiddleware
from tests.web.harness import HANG_SECONDS, Request, Response, call_wsgi, eventually

TABLE = "CREATE TABLE payments (key TEXT NOT NULL, id TEXT NOT NULL)"


class Killed(BaseException):
    """What a worker that is killed leaves behind: nothing."""


class Pass:
    """Lets a handler go on when the test says so, and the test when a handler is there."""

    def __init__(self) -> None:
        self._is_there, self._is_open = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self._is_there.set()
        assert self._is_open.wait(HANG_SECONDS)

    def wait(self) -> None:
        assert self._is_there.wait(HANG_SECONDS)

    def open(self) -> None:
        self._is_open.set()


class Bank:
    """One database, and servers of one API on it in both modes. A payment is a row."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.is_sqlite = url.startswith("sqlite")
        store = stores.store(url)
        store.migrate()
        store.close()
        with closing(self.connect()) as connection:
            connection.execute(TABLE)
        self.runs: list[str] = []
        #: What the handlers do once they have written, by mode.
        self.then: dict[str, Callable[[], None]] = {}
        self.threads = ThreadPoolExecutor(8)
        self._servers = {mode: self._server(mode) for mode in ("guard", "atomic")}

    def connect(self) -> Any:
        if self.is_sqlite:
            path = urlsplit(self.url).path.removeprefix("/")
            return sqlite3.connect(path, timeout=HANG_SECONDS, isolation_level=None)
        return psycopg.connect(self.url, autocommit=True)

    def send(self, mode: str, key: str = "key-1") -> Response:
        return call_wsgi(self._servers[mode], Request(lines=(("Idempotency-Key", key.encode()),)))

    def start(self, mode: str) -> Any:
        return self.threads.submit(self.send, mode)

    def until_final(self, mode: str, key: str = "key-1") -> Response:
        """Retry for as long as a client is told to."""
        return eventually(lambda: self.send(mode, key), lambda answer: answer.status not in {409, 503})

    @property
    def payments(self) -> dict[str, list[str]]:
        """The ids of the payments that were made, by key."""
        with closing(self.connect()) as connection:
            rows = connection.execute("SELECT key, id FROM payments").fetchall()
        return {key: [each for of, each in rows if of == key] for key, _ in rows}

    def close(self) -> None:
        self.threads.shutdown()
        for server in self._servers.values():
            server.guard.leases.close()
            server.store.close()

    def _server(self, mode: Any) -> IdempotencyMiddleware:
        policy = Policy.ietf(mode=mode, lease=timedelta(seconds=1))

        def pay(_environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
            operation = semel.current()
            self.runs.append(mode)
            number = uuid4().hex
            if mode == "atomic":
                _insert(operation.connection, operation.key, number)
            else:
                if "before" in self.then:
                    self.then.pop("before")()
                with closing(self.connect()) as connection:
                    _insert(connection, operation.key, number)
            self.then.get(mode, lambda: None)()
            start_response("201 Created", [("Content-Type", "application/json")])
            return [json.dumps({"id": number}).encode()]

        return IdempotencyMiddleware(pay, store=self.url, scope=semel.SINGLE_TENANT, policy=policy)


def _insert(connection: Any, key: str, number: str) -> None:
    # Both are made here, and have nothing in them that could be quoted.
    connection.execute(f"INSERT INTO payments VALUES ('{key}', '{number}')")


@pytest.fixture(params=["sqlite", "postgres"])
def bank(request: pytest.FixtureRequest) -> Iterator[Bank]:
    bank = Bank(request.getfixturevalue(f"{request.param}_url"))
    yield bank
    bank.close()


def ids(answers: Iterable[Response]) -> set[str]:
    return {answer.json()["id"] for answer in answers}


def test_atomic_stands_aside_for_a_guarded_run(bank: Bank) -> None:
    """A key that a guarded handler holds is busy to atomic mode, and its answer is replayed there."""
    bank.then["guard"] = gate = Pass()
    first = bank.start("guard")
    gate.wait()
    assert bank.send("atomic").status == 409
    gate.open()
    answers = [first.result(HANG_SECONDS), bank.send("atomic"), bank.send("guard")]
    assert [(each.status, each.is_replay) for each in answers] == [(201, False), (201, True), (201, True)]
    assert bank.payments == {"key-1": list(ids(answers))}
    assert bank.runs == ["guard"]


def test_a_guarded_run_beside_an_atomic_one(bank: Bank) -> None:
    """One of the two takes effect, and all get its answer. On SQLite one runs; on PostgreSQL both may, and the atomic
    one is undone: its lock is seen by atomic workers only.
    """
    bank.then["atomic"] = gate = Pass()
    first = bank.start("atomic")
    gate.wait()
    second = bank.start("guard")
    if not bank.is_sqlite:
        assert second.result(HANG_SECONDS).status == 201
    gate.open()
    undone = first.result(HANG_SECONDS)
    answers = [bank.until_final(mode) for mode in ("guard", "atomic")]
    assert bank.payments == {"key-1": list(ids(answers))}
    assert all(each.is_replay for each in answers)
    if bank.is_sqlite:
        assert (undone.status, bank.runs) == (201, ["atomic"])
    else:
        assert (undone.status, undone.code) == (409, "idempotency-key-in-progress")
        assert bank.runs == ["atomic", "guard"]


def test_a_dead_workers_key_is_taken_over_by_both_kinds(bank: Bank) -> None:
    """Where a guarded worker has died, workers of both kinds may take its operation over; one of them takes effect."""

    def die() -> None:
        raise Killed

    bank.then["before"] = die
    with pytest.raises(Killed):
        bank.send("guard")
    bank.then["atomic"] = gate = Pass()
    first = bank.threads.submit(bank.until_final, "atomic")
    gate.wait()
    second = bank.threads.submit(bank.until_final, "guard")
    if not bank.is_sqlite:
        assert second.result(HANG_SECONDS).status == 201
    gate.open()
    answers = [first.result(HANG_SECONDS), second.result(HANG_SECONDS), bank.send("guard"), bank.send("atomic")]
    assert {each.status for each in answers} == {201}
    assert bank.payments == {"key-1": list(ids(answers))}


def test_a_crowd_in_both_modes(bank: Bank) -> None:
    """Of many requests with one key, half of them to each kind of worker, all get one answer, and one took effect."""
    keys = [f"key-{number}" for number in range(10)]
    asked = [(mode, key) for key in keys for mode in ("guard", "atomic") * 4]
    given = list(bank.threads.map(lambda each: (each[1], bank.until_final(*each)), asked))
    assert {answer.status for _, answer in given} == {201}
    assert bank.payments == {key: list(ids(answer for of, answer in given if of == key)) for key in keys}
