"""Atomic mode by ASGI and WSGI, on real databases: the handler's rows and its answer commit together, or neither."""

import asyncio
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit
from wsgiref.types import StartResponse, WSGIEnvironment

import psycopg
import pytest
from starlette.applications import Starlette
from starlette.requests import Request as StarletteRequest
from starlette.responses import PlainTextResponse
from starlette.routing import Route

import semel
import semel.asgi
import semel.wsgi
from semel import NoEffect, Policy, stores
from semel.core.commands import Look
from semel.core.record import Hold, Record
from semel.core.state import State
from semel.errors import ConfigurationError, NoConnection
from tests.web.harness import HANG_SECONDS, Request, Response, call_asgi, call_wsgi

TABLE = "CREATE TABLE payments (id INTEGER PRIMARY KEY, note TEXT NOT NULL, CONSTRAINT small CHECK (id < 1000))"


class Bank:
    """One database, looked at from outside."""

    def __init__(self, url: str) -> None:
        self.url = url
        store = stores.store(url)
        store.migrate()
        store.close()
        self.run(TABLE)

    def run(self, sql: str) -> list[Any]:
        connection: Any
        if self.url.startswith("sqlite"):
            connection = sqlite3.connect(urlsplit(self.url).path.removeprefix("/"), timeout=HANG_SECONDS)
        else:
            connection = psycopg.connect(self.url)
        with closing(connection), connection:
            cursor = connection.execute(sql)
            return list(cursor.fetchall()) if cursor.description else []

    @property
    def payments(self) -> list[Any]:
        return self.run("SELECT id, note FROM payments ORDER BY id")

    def record(self, key: str = "key-1") -> Record | None:
        with stores.store(self.url) as store:
            return store.perform(Look("alice", key))


class Api:
    """A payment endpoint behind one entry point. What it does after its INSERT is for the test to say."""

    def __init__(self, entry: str, bank: Bank, **policy: Any) -> None:
        self.bank = bank
        self.runs = 0
        self.status = 201
        self.then: Callable[[], object] = lambda: None
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        settings: dict[str, Any] = {
            "scope": lambda _: "alice",
            "policy": Policy.ietf(mode="atomic", **policy),
            "store": bank.url,
        }
        self.is_async = entry == "asgi"
        if self.is_async:
            app = Starlette(routes=[Route("/pay", self._serve_async, methods=["POST"])])
            self.asgi = semel.asgi.IdempotencyMiddleware(app, **settings)
        else:
            self.wsgi = semel.wsgi.IdempotencyMiddleware(self._serve, **settings)

    def start(self, key: str = "key-1", body: bytes = b"5") -> Any:
        request = Request(lines=(("Idempotency-Key", key.encode()),), body=body)
        if self.is_async:
            return asyncio.run_coroutine_threadsafe(call_asgi(self.asgi, request), self.loop)
        answer: Any = _Future()
        threading.Thread(target=lambda: answer.settle(lambda: call_wsgi(self.wsgi, request)), daemon=True).start()
        return answer

    def send(self, key: str = "key-1", body: bytes = b"5") -> Response:
        response: Response = self.start(key, body).result(HANG_SECONDS)
        return response

    def close(self) -> None:
        if self.is_async:
            asyncio.run_coroutine_threadsafe(self.asgi.store.close(), self.loop).result(HANG_SECONDS)
        else:
            self.wsgi.store.close()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()

    @property
    def _insert(self) -> str:
        self.runs += 1
        return f"INSERT INTO payments (id, note) VALUES ({self.runs}, 'paid')"

    async def _serve_async(self, request: StarletteRequest) -> PlainTextResponse:
        connection = semel.current().connection
        done = connection.execute(self._insert)
        if hasattr(done, "__await__"):
            await done
        await asyncio.to_thread(self.then)
        return PlainTextResponse(f"paid {self.runs}", self.status)

    def _serve(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        semel.current().connection.execute(self._insert)
        self.then()
        start_response(f"{self.status} Whatever", [("Content-Type", "text/plain")])
        return [f"paid {self.runs}".encode()]


class _Future:
    def __init__(self) -> None:
        self._done = threading.Event()

    def settle(self, call: Callable[[], Response]) -> None:
        self._response = call()
        self._done.set()

    def result(self, seconds: float) -> Response:
        assert self._done.wait(seconds), "It hangs."
        return self._response


@pytest.fixture(params=["asgi", "wsgi"])
def entry(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(params=["sqlite", "postgres"])
def bank(request: pytest.FixtureRequest) -> Bank:
    return Bank(request.getfixturevalue(f"{request.param}_url"))


@pytest.fixture
def make(entry: str, bank: Bank) -> Iterator[Callable[..., Api]]:
    made: list[Api] = []

    def make(**policy: Any) -> Api:
        made.append(Api(entry, bank, **policy))
        return made[-1]

    yield make
    for api in made:
        api.close()


@pytest.fixture
def api(make: Callable[..., Api]) -> Api:
    return make()


def test_both_or_neither(api: Api) -> None:
    """The row and the answer are there together, and before the commit neither is."""
    seen: list[Any] = []
    api.then = lambda: seen.extend([api.bank.payments, api.bank.run("SELECT key FROM semel_keys")])
    response = api.send()
    assert (response.status, response.body) == (201, b"paid 1")
    assert seen == [[], []]
    assert api.bank.payments == [(1, "paid")]
    record = api.bank.record()
    assert record is not None
    assert (record.state, record.attempt, record.lease_left) == (State.COMPLETE, 1, None)
    again = api.send()
    assert again.is_replay
    assert again.body == b"paid 1"
    assert api.runs == 1


@pytest.mark.parametrize("how", ["raise", "500", "NoEffect"])
def test_an_error_undoes_everything_and_frees_the_key(api: Api, how: str) -> None:
    """An exception or a 5xx leaves no row and no record, and a retry runs as if for the first time."""
    errors = {"raise": RuntimeError("The handler broke."), "NoEffect": NoEffect()}
    if how in errors:
        api.then = _raiser(errors[how])
    else:
        api.status = 500
    api.send()
    assert api.bank.payments == []
    assert api.bank.record() is None
    api.then, api.status = (lambda: None), 201
    assert api.send().status == 201
    assert api.bank.payments == [(2, "paid")]


def test_a_kept_server_error_keeps_no_rows(make: Callable[..., Api]) -> None:
    """With server_errors="keep" the 5xx is repeated, but what the handler wrote before it is undone."""
    api = make(server_errors="keep")
    api.status = 503
    assert api.send().status == 503
    assert api.bank.payments == []
    assert api.send().is_replay
    assert api.runs == 1


def test_a_refusal_of_the_handlers_commits(api: Api) -> None:
    """A 4xx is an answer like any other: what the handler wrote goes with it."""
    api.status = 402
    assert api.send().status == 402
    assert api.bank.payments == [(1, "paid")]
    assert api.send().is_replay


def test_two_at_once(api: Api) -> None:
    """Two at once: one runs, the other gets 409; one with another body gets 422 even then."""
    running, go = threading.Event(), threading.Event()

    def wait() -> None:
        running.set()
        assert go.wait(HANG_SECONDS)

    api.then = wait
    first = api.start()
    assert running.wait(HANG_SECONDS)
    assert api.send().code == "idempotency-key-in-progress"
    assert api.send(body=b"6").code == "idempotency-key-reused"
    go.set()
    assert first.result(HANG_SECONDS).status == 201
    assert api.send().is_replay
    assert api.runs == 1


def test_another_body(api: Api) -> None:
    """The same key with another body is refused, and nothing runs."""
    api.send()
    assert api.send(body=b"6").status == 422
    assert api.runs == 1


def test_many_keys_at_once(api: Api) -> None:
    """Requests with different keys all get through, whatever the store has to queue."""
    number = 20
    api.bank.run("DROP TABLE payments")
    api.bank.run("CREATE TABLE payments (id INTEGER, note TEXT)")
    answers = [api.start(key=f"key-{each}") for each in range(number)]
    assert [each.result(HANG_SECONDS).status for each in answers] == [201] * number
    assert len(api.bank.payments) == number


def test_no_connection_outside(entry: str, bank: Bank) -> None:
    """Outside atomic mode there is no connection to be had, and the error says what to do."""
    operation = semel.Operation(Hold("alice", "key-1", 1, bytes(16)))
    with pytest.raises(NoConnection, match='mode="atomic"'):
        operation.connection  # noqa: B018 - reading it is the point


def test_steps_are_refused(api: Api) -> None:
    """A handler in atomic mode is one transaction, and has no steps."""
    caught: list[Exception] = []
    current = semel.current

    def step() -> None:
        try:
            current().phase("never", lambda _: None)
        except ConfigurationError as error:
            caught.append(error)

    api.then = step
    api.send()
    assert 'mode="guard"' in str(caught[0])


def _raiser(error: Exception) -> Callable[[], object]:
    def throw() -> object:
        raise error

    return throw
