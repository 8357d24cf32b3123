"""Answers that don't end: they reach the client in time, nothing runs twice, and the app learns who has gone."""

import asyncio
import gc
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from wsgiref.types import StartResponse, WSGIEnvironment

import flask
import pytest

import semel.asgi
import semel.flask
import semel.wsgi
from semel import Policy
from semel.asgi import PER_ROUTE, claim
from semel.core.commands import Complete
from semel.errors import StoreUnavailable
from semel.flows import handle
from semel.stores.memory import AsyncMemoryStore, MemoryStore
from tests.web.harness import (
    HANG_SECONDS,
    AsgiClient,
    Request,
    Response,
    asgi_scope,
    call_asgi,
    call_wsgi,
    wsgi_environ,
)

SOON = Policy.ietf(max_response_time=timedelta(milliseconds=30))
#: In a line-by-line type, without a length.
LINES = (b"content-type", b"application/x-ndjson")
EVENTS = (b"content-type", b"text/event-stream")
SEND = Request(lines=(("Idempotency-Key", b"key-1"),), body=b"{}")


class Silent:
    """An app that sends one part of an answer and then nothing, until its client has gone."""

    def __init__(self, *, is_per_route: bool = False) -> None:
        self.runs = 0
        self.is_per_route = is_per_route
        self.has_learned = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if self.is_per_route:
            try:
                await claim(scope, "alice", SOON)
            except semel.asgi.Settled:
                return
        self.runs += 1
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
        await send({"type": "http.response.body", "body": b"tick", "more_body": True})
        try:
            assert (await receive())["type"] == "http.disconnect"
        finally:
            self.has_learned.set()


class Client(AsgiClient):
    """A client that says when it was sent something."""

    def __init__(self) -> None:
        super().__init__(SEND)
        self.got = asyncio.Event()

    async def send(self, message: Any) -> None:
        await super().send(message)
        if message["type"] == "http.response.body":
            self.got.set()


def guarded(app: Silent) -> Any:
    scope: Any = PER_ROUTE if app.is_per_route else semel.SINGLE_TENANT
    return semel.asgi.IdempotencyMiddleware(app, store=AsyncMemoryStore(), scope=scope, policy=SOON)


@pytest.mark.parametrize("is_per_route", [False, True])
async def test_silent_stream_is_sent_in_time(*, is_per_route: bool) -> None:
    """What a silent stream has said so far reaches the client when the time is over, and a retry is told so."""
    silent, client = Silent(is_per_route=is_per_route), Client()
    app = guarded(silent)
    serving = asyncio.ensure_future(app(asgi_scope(SEND), client.receive, client.send))
    await asyncio.wait_for(client.got.wait(), HANG_SECONDS)
    assert [message.get("body") for message in client.sent] == [None, b"tick"]
    assert (await call_asgi(app, SEND)).code == "response-not-replayable"
    client.gone.set()
    await asyncio.wait_for(serving, HANG_SECONDS)
    assert silent.has_learned.is_set()
    assert silent.runs == 1


async def test_stream_whose_server_gives_up_ends() -> None:
    """A server that cancels the request of a client who has gone ends a stream that flows."""
    silent, client = Silent(), Client()
    serving = asyncio.ensure_future(guarded(silent)(asgi_scope(SEND), client.receive, client.send))
    await asyncio.wait_for(client.got.wait(), HANG_SECONDS)
    serving.cancel()
    await asyncio.wait_for(silent.has_learned.wait(), HANG_SECONDS)


async def test_stream_whose_client_went_before_ends_with_its_tombstone() -> None:
    """A client who goes while the answer is held back ends nothing at once; when the time is over, the stream ends."""
    silent, client = Silent(), Client()
    app = guarded(silent)
    started = asyncio.Event()

    async def receive() -> Any:
        started.set()
        return await client.receive()

    serving = asyncio.ensure_future(app(asgi_scope(SEND), receive, client.send))
    await asyncio.wait_for(started.wait(), HANG_SECONDS)
    while not silent.runs:  # noqa: ASYNC110 - the handler has no way to say that it has begun
        await asyncio.sleep(0)
    serving.cancel()
    await asyncio.wait_for(silent.has_learned.wait(), HANG_SECONDS)
    assert client.sent == []
    assert (await call_asgi(app, SEND)).code == "response-not-replayable"
    assert silent.runs == 1


@pytest.mark.parametrize("is_per_route", [False, True])
async def test_stream_whose_server_has_gone_is_no_error(*, is_per_route: bool) -> None:
    """A stream that learns from its ``send`` that its client has gone ends, and no error is left for no one to see."""
    said: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: said.append(context))
    begun, go, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    class Chatty(Silent):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            if self.is_per_route:
                await claim(scope, "alice", SOON)
            begun.set()
            await go.wait()
            try:
                await send({"type": "http.response.start", "status": 200, "headers": [EVENTS]})
            finally:
                ended.set()

    client = Client()
    app = guarded(Chatty(is_per_route=is_per_route))
    serving = asyncio.ensure_future(app(asgi_scope(SEND), client.receive, client.send))
    await asyncio.wait_for(begun.wait(), HANG_SECONDS)
    serving.cancel()
    await asyncio.wait([serving])
    go.set()
    await asyncio.wait_for(ended.wait(), HANG_SECONDS)
    if left := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(left, timeout=HANG_SECONDS)
    del serving
    gc.collect()
    assert said == []


async def test_stream_whose_tombstone_can_not_be_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of a stream leaves before its tombstone is stored: without its store it is a 503, and the app is told."""

    class Forgetful(AsyncMemoryStore):
        def perform(self, command: Any) -> Any:
            if isinstance(command, Complete):
                raise StoreUnavailable
            return super().perform(command)

    monkeypatch.setattr(handle, "COMPLETE_PAUSES", (timedelta(0),))
    silent, client = Silent(), Client()
    app = semel.asgi.IdempotencyMiddleware(silent, store=Forgetful(), scope=semel.SINGLE_TENANT, policy=SOON)
    await asyncio.wait_for(app(asgi_scope(SEND), client.receive, client.send), HANG_SECONDS)
    assert client.response().code == "answer-not-stored"
    assert silent.has_learned.is_set()


def test_wsgi_stream_is_closed() -> None:
    """A server that closes a flowing answer closes the app's own, which learns that its client has gone."""
    ended: list[str] = []

    def ticks() -> Iterator[bytes]:
        try:
            while True:
                yield b"tick"
        finally:
            ended.append("closed")

    def app(_environ: WSGIEnvironment, start_response: StartResponse) -> Iterator[bytes]:
        start_response("200 OK", [("Content-Type", "text/plain")])
        return ticks()

    guarded = semel.wsgi.IdempotencyMiddleware(app, store=MemoryStore(), scope=semel.SINGLE_TENANT, policy=SOON)
    started: list[str] = []

    def start(status: str, *_: Any) -> Any:
        started.append(status)

    answer: Any = guarded(wsgi_environ(SEND), start)
    assert next(iter(answer)).startswith(b"tick")
    assert (started, ended) == (["200 OK"], [])
    assert call_wsgi(guarded, SEND).code == "response-not-replayable"
    answer.close()
    assert ended == ["closed"]
    guarded.guard.leases.close()


class Reports:
    """Takes a step, then answers line by line, and takes another while it does."""

    def __init__(self) -> None:
        self.taken: list[str] = []

    def take(self, name: str, *, idempotency_key: str) -> str:
        assert idempotency_key
        self.taken.append(name)
        return name

    def lines(self) -> Iterator[bytes]:
        yield b"[1]\n"
        semel.current().effect("second", self.take, "second")
        yield b"[2]\n"

    def asgi(self) -> Callable[[], Response]:
        async def app(_scope: Any, _receive: Any, send: Any) -> None:
            await semel.current().effect("first", self.take, "first")  # type: ignore[misc]  # it is awaited on a loop
            await send({"type": "http.response.start", "status": 200, "headers": [LINES]})
            await send({"type": "http.response.body", "body": b"[1]\n", "more_body": True})
            await semel.current().effect("second", self.take, "second")  # type: ignore[misc]  # as above
            await send({"type": "http.response.body", "body": b"[2]\n"})

        guarded = semel.asgi.IdempotencyMiddleware(app, store=AsyncMemoryStore(), scope=semel.SINGLE_TENANT)
        return lambda: asyncio.run(call_asgi(guarded, SEND))

    def wsgi(self) -> Callable[[], Response]:
        def app(_environ: WSGIEnvironment, start_response: StartResponse) -> Iterator[bytes]:
            semel.current().effect("first", self.take, "first")
            start_response("200 OK", [("Content-Type", "application/x-ndjson")])
            return self.lines()

        guarded = semel.wsgi.IdempotencyMiddleware(app, store="memory://", scope=semel.SINGLE_TENANT)
        return lambda: call_wsgi(guarded, SEND)

    def flask(self) -> Callable[[], Response]:
        app = flask.Flask("reports")
        semel.flask.Semel(app, store="memory://", scope=semel.SINGLE_TENANT)

        @app.post("/pay")
        @semel.flask.idempotent
        def pay() -> flask.Response:
            semel.current().effect("first", self.take, "first")
            return flask.Response(self.lines(), mimetype="application/x-ndjson")

        return lambda: call_wsgi(app, SEND)


@pytest.mark.parametrize("entry", [Reports.asgi, Reports.wsgi, Reports.flask], ids=["asgi", "wsgi", "flask"])
def test_lines_of_a_handler_that_takes_steps_are_held_back(entry: Callable[[Reports], Callable[[], Response]]) -> None:
    """A handler that takes steps is not done when it begins to answer by lines: they are kept once they are whole."""
    reports = Reports()
    call = entry(reports)
    first, again = call(), call()
    assert (first.status, first.body) == (again.status, again.body) == (200, b"[1]\n[2]\n")
    assert reports.taken == ["first", "second"]


@pytest.mark.parametrize("media_type", ["text/plain", "application/x-ndjson"])
def test_stream_of_a_flask_view_that_flows_is_still_of_its_operation(media_type: str) -> None:
    """A stream of which more comes after its answer has begun to flow still finds its operation, and is closed."""
    closed: list[str] = []
    app = flask.Flask("stream")
    semel.flask.Semel(app, store="memory://", scope=semel.SINGLE_TENANT, policy=Policy.ietf(max_response_body=10))

    def lines() -> Iterator[str]:
        try:
            for _ in range(4):
                yield semel.current().key
        finally:
            closed.append("closed")

    @app.post("/pay")
    @semel.flask.idempotent
    def pay() -> flask.Response:
        return flask.Response(lines(), mimetype=media_type)

    assert call_wsgi(app, SEND).body == b"key-1" * 4
    assert closed == ["closed"]
    assert call_wsgi(app, SEND).code == "response-not-replayable"


def test_atomic_mode_has_no_time_limit(sqlite_url: str) -> None:
    """In atomic mode an answer is held back until its handler has ended: all of its writes are one transaction."""
    notes: list[bytes] = []

    def app(_environ: WSGIEnvironment, start_response: StartResponse) -> Iterator[bytes]:
        start_response("201 Created", [("Content-Type", "application/x-ndjson")])
        connection = semel.current().connection
        connection.execute("CREATE TABLE notes (line TEXT)")
        for line in (b"one\n", b"two\n", b"three\n"):
            connection.execute("INSERT INTO notes VALUES (?)", (line.decode(),))
            notes.append(line)
            yield line

    policy = Policy.ietf(mode="atomic", max_response_time=timedelta(microseconds=1))
    guarded = semel.wsgi.IdempotencyMiddleware(app, store=sqlite_url, scope=lambda _: "alice", policy=policy)
    first, again = (call_wsgi(guarded, SEND) for _ in range(2))
    assert (first.status, first.body) == (201, b"one\ntwo\nthree\n")
    assert (again.status, again.body, again.is_replay) == (201, first.body, True)
    assert len(notes) == 3
    guarded.guard.leases.close()
    guarded.store.close()
