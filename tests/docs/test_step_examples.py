"""The programs with phases and effects: broken where their pages break them, and resumed."""

import asyncio
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from semel import stores
from semel.core.commands import Claim, Look
from semel.core.message import Head, Request
from semel.core.state import State
from tests.docs.served import ASKING, EXAMPLES, HANG_SECONDS, asgi, load, process, server, wsgi
from tests.kit.servers import free_port

KEY = {"Idempotency-Key": "order-17"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Examples keep their files where they are started."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


class LosesOneAnswer(list[Any]):
    """A provider that does what it is asked, and whose first answer is lost."""

    is_lost = False

    def append(self, order: Any) -> None:
        super().append(order)
        self._lose()

    def _lose(self) -> None:
        if not self.is_lost:
            self.is_lost = True
            raise ConnectionError("The answer was lost.")


class LosesOneKeyedAnswer(dict[str, Any]):
    """The same, once per key."""

    is_lost = False

    def setdefault(self, key: str, order: Any) -> Any:  # type: ignore[override]  # nobody needs the other form
        is_new = key not in self
        self[key] = super().setdefault(key, order)
        if is_new and not self.is_lost:
            self.is_lost = True
            raise ConnectionError("The answer was lost.")
        return self[key]


def rows(file: str, query: str) -> list[Any]:
    with closing(sqlite3.connect(file)) as connection:
        return connection.execute(query).fetchall()


async def test_phases() -> None:
    """An answer of the provider's that is lost is asked for again with the same key; the order is not made again."""
    example: Any = load("phases_app")
    example.charges = LosesOneKeyedAnswer()
    async with asgi(example.app) as client:
        answers = [await client.post("/orders", json={"amount": 50}, headers=KEY) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [503, 201, 201]
    assert answers[1].content == answers[2].content
    assert list(example.charges.values()) == [50]
    assert rows("shop.db", "SELECT id, amount, charge FROM orders") == [(1, 50, answers[1].json()["charge"])]


def test_effects() -> None:
    """Each provider loses an answer: one is called again with its key, one is asked, and one is left to a person."""
    example: Any = load("effects_app")
    example.cards, example.parcels, example.faxes = LosesOneKeyedAnswer(), LosesOneAnswer(), LosesOneAnswer()
    with wsgi(example.app, example.app.wsgi_app) as client:

        def post(order: int, key: str = "order-17") -> httpx.Response:
            try:
                return client.post("/orders", json={"order": order}, headers={"Idempotency-Key": key})
            except ConnectionError:
                return httpx.Response(500)

        answers = [post(7) for _ in range(5)]
        assert [answer.status_code for answer in answers] == [503, 503, 503, 409, 409]
        assert answers[4].json()["code"] == "outcome-unknown"
        assert semel("keys", "resolve", "order-17", "--applied", "null", "--yes", store="orders.db")
        done = post(7)
        assert (done.status_code, done.json()) == (201, {"charge": "ch_1", "parcel": 1})
        declined = [post(-1, "poor") for _ in range(2)]
        assert [each.status_code for each in declined] == [402, 402]
        assert declined[1].headers["idempotent-replayed"] == "true"
    assert (list(example.cards.values()), example.parcels, example.faxes) == ([7], [7], [7])


async def test_work() -> None:
    """An operation whose worker died, and whose client never came back, is finished; it knows whose it is."""
    example = load("work_app")
    headers = ((b"content-type", b"application/json"), (b"authorization", b"Bearer token-of-alice"))
    request = Request(Head("POST", "/orders", b"", headers), b'{"item": "tea"}', "alice")
    with closing(stores.store("sqlite:///semel.db")) as store:
        store.migrate()
        moment = timedelta(milliseconds=1)
        store.perform(Claim("alice", "k", b"0" * 16, b"", moment, timedelta(days=1), "rerun", "delete", request))
        assert "token-of-alice" not in str(rows("semel.db", "SELECT * FROM semel_keys"))
        with closing(sqlite3.connect("semel.db")) as connection, connection:
            connection.execute("UPDATE semel_keys SET lease_expires_at = lease_expires_at - 60000")
        async with asgi(example.app):
            while (record := store.perform(Look("alice", "k"))) and record.state is not State.COMPLETE:  # noqa: ASYNC110 - the completer tells nobody
                await asyncio.sleep(0.02)
    assert record is not None
    assert record.answer is not None
    assert (record.answer.status, record.attempt) == (201, 2)
    assert example.orders == [("alice", "tea")]


@contextmanager
def bank(folder: Path) -> Iterator[str]:
    """The card company of the tutorial, and the programs that call it. It answers at once, or never: see `killed`."""
    port = free_port()
    slowly = f"time.sleep({HANG_SECONDS} if len(book) == int(open('held').read()) else 0)"
    (folder / "held").write_text("0")
    for name in ("bank", "naive", "steps"):
        program = (EXAMPLES / "tutorial" / f"{name}.py").read_text().replace("9000", str(port))
        program = program.replace("time.sleep(SLOW)", slowly).replace("seconds=5", "seconds=1")
        (folder / f"{name}.py").write_text(program)
    with process(folder, ["bank.py"], port):
        yield f"http://127.0.0.1:{port}"


def killed(folder: Path, books: str, lines: int, key: dict[str, str] = KEY) -> None:
    """Send a payment, and kill -9 the server when the books have so many lines, and it waits for an answer."""
    (folder / "held").write_text(str(lines))
    with server(folder) as (running, url):

        def kill() -> None:
            while len(book(books)) < lines:
                threading.Event().wait(0.02)
            running.kill()

        killer = threading.Thread(target=kill)
        killer.start()
        with pytest.raises(httpx.HTTPError):
            httpx.post(url, json={"amount": 50}, headers=key, **ASKING)
        killer.join()
    (folder / "held").write_text("0")


def retried(folder: Path, amount: int = 50, key: dict[str, str] = KEY) -> httpx.Response:
    """Do as a good client does."""
    with server(folder) as (_, url):
        while True:
            answer = httpx.post(url, json={"amount": amount}, headers=key, **ASKING)
            if "in-progress" not in answer.text and answer.status_code not in {500, 503}:
                return answer
            threading.Event().wait(0.05)  # what the answer asks for, only more often


def book(books: str) -> list[str]:
    return httpx.get(books, **ASKING).text.splitlines()


@pytest.mark.slow
def test_tutorial_naive(folder: Path) -> None:
    """After kill -9, a retry of the naive endpoint makes a second payment and a second charge."""
    name = "tutorial/naive"
    with bank(folder) as books:
        (folder / "payments.py").write_text((folder / f"{Path(name).name}.py").read_text())
        killed(folder, books, 1)
        assert retried(folder).json() == {"payment": 2, "charge": "ch_2"}
        assert book(books) == ["charge of 50", "charge of 50", "mail to ada"]


@pytest.mark.slow
def test_tutorial_steps(folder: Path) -> None:
    """After kill -9 the retry goes on; a lost answer is asked for again; a mail of which nobody knows is parked."""
    names = "tutorial/bank", "tutorial/steps"
    with bank(folder) as books:
        (folder / "payments.py").write_text((folder / f"{Path(names[1]).name}.py").read_text())
        killed(folder, books, 1)
        assert retried(folder).json() == {"payment": 1, "charge": "ch_1"}
        assert book(books) == ["charge of 50", "mail to ada"]

        unlucky = retried(folder, 13, {"Idempotency-Key": "unlucky"})
        assert unlucky.json() == {"payment": 2, "charge": "ch_3"}
        assert book(books)[2:] == ["charge of 13", "mail to ada"]

        key = {"Idempotency-Key": "order-18"}
        killed(folder, books, 6, key)
        assert retried(folder, key=key).json()["code"] == "outcome-unknown"
        assert "order-18" in semel("keys", "list", "--state", "unknown", store="payments.db")
        assert "Resolved." in semel(
            "keys", "resolve", "order-18", "--applied", '"mail_6"', "--yes", store="payments.db"
        )
        assert retried(folder, key=key).json() == {"payment": 3, "charge": "ch_5"}
        assert book(books)[4:] == ["charge of 50", "mail to ada"]
    assert rows("payments.db", "SELECT * FROM payments") == [(1, 50, "ch_1"), (2, 13, "ch_3"), (3, 50, "ch_5")]


def semel(*command: str, store: str) -> str:
    """Type a command."""
    typed = [sys.executable, "-m", "semel", *command, "--store", f"sqlite:///{store}"]
    return subprocess.run(typed, check=True, capture_output=True, text=True).stdout
