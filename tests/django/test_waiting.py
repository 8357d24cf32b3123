"""Waiting in Django: clients that hang up, connections that nobody holds, loops that live for one request."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import psycopg
import pytest
from asgiref.sync import sync_to_async
from django.core.handlers.asgi import ASGIHandler
from django.db import connection, transaction
from django.http import HttpResponse
from django.test import Client
from django.urls import path

from semel import Policy
from semel.core.commands import Command, Release
from semel.django import guards, idempotent
from semel.django.waiting import close_connections
from semel.guard.waiting import MAX_THREADS
from semel.stores.django import AsyncDjangoStore, DjangoStore
from tests.django import project
from tests.django.entry import code, everybody, is_replay, records
from tests.web.harness import HANG_SECONDS, AsgiClient, Request, asgi_scope, wait_until

OURS = "semel.django.IdempotencyMiddleware"
POLICY = Policy.ietf(in_progress="wait")
KEYED = Request("POST", "/pay", (("Idempotency-Key", b"k"), ("Content-Type", b"application/json")), b'{"amount": 5}')
ENTRIES = ["decorator", "middleware"]


def waiting() -> int:
    return guards.guard().room.count + guards.async_guard().room.count


class Shop:
    """An async view that is held until it is let go, through Django's ASGI handler."""

    def __init__(self, entry: str) -> None:
        self._entry = entry
        self.runs = 0
        self.let_go = asyncio.Event()

    async def pay(self, _request: Any) -> HttpResponse:
        self.runs += 1
        await self.let_go.wait()
        return HttpResponse("paid", status=201)

    def serving(self) -> Any:
        said = {"SCOPE": everybody, "POLICY": POLICY}
        if self._entry == "decorator":
            return project.serving([path("pay", idempotent(self.pay))], MIDDLEWARE=[], SEMEL=said)
        return project.serving([path("pay", self.pay)], MIDDLEWARE=[OURS], SEMEL=said)

    def start(self) -> tuple[AsgiClient, "asyncio.Task[None]"]:
        client = AsgiClient(KEYED)
        return client, asyncio.create_task(self._handler(asgi_scope(KEYED), client.receive, client.send))

    @asynccontextmanager
    async def first(self) -> AsyncIterator[None]:
        """Have a request in its view, and at the end its answer."""
        with self.serving():
            self._handler = ASGIHandler()
            client, task = self.start()
            await until(lambda: self.runs == 1)
            yield
            self.let_go.set()
            await asyncio.wait_for(task, HANG_SECONDS)
            assert client.response().status == 201


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(HANG_SECONDS):
        while not is_so():  # noqa: ASYNC110 - there is no event for every count
            await asyncio.sleep(0.005)


def noting(monkeypatch: pytest.MonkeyPatch, kind: Any) -> list[type[Command[Any]]]:
    """Note what a store is asked."""
    asked: list[type[Command[Any]]] = []
    perform = kind.perform

    def note(self: Any, command: Command[Any]) -> Any:
        asked.append(type(command))
        return perform(self, command)

    monkeypatch.setattr(kind, "perform", note)
    return asked


@pytest.mark.parametrize("entry", ENTRIES)
async def test_a_client_that_hangs_up(postgres: str, entry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who hangs up while it is kept waiting, on a loop or in a thread behind it, waits no longer; others wait on."""
    asked = noting(monkeypatch, AsyncDjangoStore if entry == "decorator" else DjangoStore)
    shop = Shop(entry)
    async with shop.first():
        gone, stays = [shop.start() for _ in range(2)], shop.start()
        await until(lambda: waiting() == 3)
        for client, task in gone:
            client.gone.set()
            await asyncio.wait_for(task, HANG_SECONDS)
        await until(lambda: waiting() == 1)
        shop.let_go.set()
        await asyncio.wait_for(stays[1], HANG_SECONDS)
        assert stays[0].response().is_replay
    assert (shop.runs, waiting()) == (1, 0)
    assert Release not in asked


def sessions(url: str) -> int:
    """How many connections there are to a database."""
    with psycopg.connect(url, autocommit=True) as own:
        query = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        row = own.execute(query).fetchone()
    assert row is not None
    return int(row[0])


async def test_nobody_who_waits_has_a_connection(postgres: str) -> None:
    """Thirty requests to an async view that wait have closed what they had opened, and open it again for their turn."""
    shop = Shop("decorator")
    async with shop.first():
        await until(lambda: sessions(postgres) >= 1)
        before = sessions(postgres)
        started = [shop.start() for _ in range(30)]
        await until(lambda: waiting() == 30)
        assert sessions(postgres) <= before + 1
        shop.let_go.set()
        for client, task in started:
            await asyncio.wait_for(task, HANG_SECONDS)
            assert client.response().is_replay
    assert shop.runs == 1


async def test_a_connection_in_a_transaction_is_left_alone(sqlite: str) -> None:
    """What a test case holds open around a request is not closed because the request waits."""

    def begin() -> Any:
        block = transaction.atomic()
        block.__enter__()
        return block

    block = await sync_to_async(begin)()
    await close_connections()

    def end() -> bool:
        was_open = connection.connection is not None
        block.__exit__(None, None, None)
        return was_open

    assert await sync_to_async(end)()
    await close_connections()
    assert await sync_to_async(lambda: connection.connection is None)()


class Threads:
    """A view that is held until it is let go, through Django's WSGI handler, on a few threads."""

    def __init__(self) -> None:
        self.entered, self.let_go = threading.Event(), threading.Event()
        self.pool = ThreadPoolExecutor(8)

    async def apay(self, _request: Any) -> HttpResponse:
        self.entered.set()
        assert await asyncio.to_thread(self.let_go.wait, HANG_SECONDS)
        return HttpResponse("paid", status=201)

    def start(self) -> "Future[Any]":
        return self.pool.submit(self._post)

    def _post(self) -> Any:
        headers = {"Idempotency-Key": "k"}
        return Client().post("/pay", data={"amount": 5}, content_type="application/json", headers=headers)


def test_loops_that_live_for_one_request(sqlite: str) -> None:
    """Under WSGI each request to an async view has a loop of its own: they wait for each other all the same, and are
    as few as other threads that wait.
    """
    threads = Threads()
    view = idempotent(policy=POLICY)(threads.apay)
    with project.serving([path("pay", view)], MIDDLEWARE=[], SEMEL={"SCOPE": everybody}):
        try:
            first = threads.start()
            assert threads.entered.wait(HANG_SECONDS)
            others = [threads.start() for _ in range(MAX_THREADS)]
            wait_until(lambda: waiting() == MAX_THREADS)
            refused = threads.start().result(HANG_SECONDS)
            assert (refused.status_code, code(refused)) == (409, "idempotency-key-in-progress")
        finally:
            threads.let_go.set()
        assert first.result(HANG_SECONDS).status_code == 201
        assert all(is_replay(each.result(HANG_SECONDS)) for each in others)
        assert (len(records()), waiting()) == (1, 0)
    threads.pool.shutdown()
