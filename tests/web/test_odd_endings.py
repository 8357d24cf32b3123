"""Handlers and requests that end as hardly any does: nothing is left open behind them, and nobody else pays for it."""

import asyncio
import threading
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from wsgiref.types import StartResponse, WSGIEnvironment

import pytest
from starlette.applications import Starlette
from starlette.requests import Request as StarletteRequest
from starlette.responses import JSONResponse
from starlette.routing import Route

import semel.asgi
import semel.wsgi
from semel import Policy
from semel.core.commands import Open, Undo
from semel.core.state import State
from semel.errors import ConfigurationError
from semel.stores import async_store
from tests.web.harness import HANG_SECONDS, Request, call_asgi, call_wsgi
from tests.web.test_steps import Api, Step, _no_threads_left

MINUTE = timedelta(minutes=1)

#: A fixture for every test here as well: the keepers' threads end with their test.
no_threads_left = _no_threads_left


class Panic(BaseException):
    """As an extension module raises it."""


def request(key: str) -> Request:
    return Request(target="/rides", lines=(("Idempotency-Key", key.encode()),), body=b"{}")


async def test_panic_in_a_phase_leaves_no_transaction_open(sqlite_url: str) -> None:
    """What is no Exception rolls a phase back, too: the file's write lock is free for the next."""

    async def panic(_connection: Any) -> None:
        raise Panic

    async def handle(incoming: StarletteRequest) -> JSONResponse:
        is_bad = incoming.headers["idempotency-key"] == "bad"
        await semel.current().phase("noted", panic if is_bad else semel.in_thread(lambda _: None))
        return JSONResponse({}, 201)

    app = Starlette(routes=[Route("/rides", handle, methods=["POST"])])
    guarded = semel.asgi.IdempotencyMiddleware(app, store=sqlite_url, scope=lambda _: "alice")
    tasks = asyncio.all_tasks()
    with suppress(Panic, asyncio.CancelledError):
        await asyncio.wait_for(call_asgi(guarded, request("bad")), HANG_SECONDS)
    for task in asyncio.all_tasks() - tasks - {asyncio.current_task()}:
        with suppress(Panic, asyncio.CancelledError):
            await asyncio.wait_for(task, HANG_SECONDS)
    good = await asyncio.wait_for(call_asgi(guarded, request("good")), HANG_SECONDS)
    assert good.status == 201
    await guarded.store.close()


def test_two_loops_at_once_are_refused(tmp_path: Path) -> None:
    """A SQLite store that is in use on one event loop says so on another, instead of taking its connections away."""
    store = async_store(f"sqlite:///{tmp_path / 'semel.db'}")
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        transaction = store.transaction()
        asyncio.run_coroutine_threadsafe(transaction.perform(Open()), loop).result(HANG_SECONDS)

        async def elsewhere() -> None:
            await store.transaction().perform(Open())

        with pytest.raises(ConfigurationError, match="another event loop"):
            asyncio.run(elsewhere())
        asyncio.run_coroutine_threadsafe(transaction.perform(Undo()), loop).result(HANG_SECONDS)
        asyncio.run_coroutine_threadsafe(store.close(), loop).result(HANG_SECONDS)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def test_close_that_raises_leaves_no_transaction_open(sqlite_url: str) -> None:
    """A WSGI app that is killed and whose close() raises as well: its transaction is rolled back all the same."""

    class Answer:
        def __iter__(self) -> "Answer":
            return self

        def __next__(self) -> bytes:
            raise Panic

        def close(self) -> None:
            raise RuntimeError("The teardown failed.")

    def app(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        start_response("201 Created", [])
        return Answer() if environ["HTTP_IDEMPOTENCY_KEY"] == "bad" else [b"fine"]

    policy = Policy.ietf(mode="atomic")
    guarded = semel.wsgi.IdempotencyMiddleware(app, store=sqlite_url, scope=lambda _: "alice", policy=policy)
    with suppress(Panic, RuntimeError):
        call_wsgi(guarded, request("bad"))
    assert call_wsgi(guarded, request("good")).status == 201
    guarded.store.close()


@pytest.mark.parametrize("entry", ["asgi", "wsgi"])
def test_completer_parks_what_is_not_guarded_any_more(entry: str) -> None:
    """A stored request of a route that has no guard now can't be run: it is parked, and hides no other."""
    api = Api(entry, store_request=True)
    api.provider.fails.append(ConnectionError("The answer was lost."))
    api.send()
    api.clock.move(MINUTE)
    guarded = api.asgi if entry == "asgi" else api.wsgi
    guarded.routes = type(guarded.routes)(None, "/elsewhere")
    api.complete()
    assert api.record.state is State.UNKNOWN


def test_completer_survives_a_panic() -> None:
    """A stored request whose handler panics costs the completer one try, and not its life."""
    api = Api("wsgi", store_request=True)
    api.provider.fails.append(ConnectionError("The answer was lost."))
    api.send()
    api.clock.move(MINUTE)
    api.steps[1] = Step("effect", "charged", _panic)
    assert "0 finished, 1 failed" in api.complete()
    assert api.record.attempt == 2


def _panic(*, idempotency_key: str) -> None:
    raise Panic
