"""Under load, with a Redis to which all kinds of things happen: the answers, and the number of effects, are those that
PostgreSQL alone gives to the same requests.
"""

import asyncio
import json
import os
import random
import signal
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from typing import Any, Protocol

import httpx
import pytest
import redis

from semel import SINGLE_TENANT, asgi, stores, wsgi
from semel.stores.tiered import Tiered
from tests.kit import servers

WORKERS = 8
#: Patience for what is bound to happen.
LONG = 60.0

Request = tuple[str, int]
Said = tuple[int, str | None, bytes]


class Shop:
    """An API that takes orders, and counts how often it has."""

    def __init__(self) -> None:
        self.effects: Counter[str] = Counter()
        self._mutex = threading.Lock()

    def order(self, key: str, body: bytes) -> bytes:
        with self._mutex:
            self.effects[key] += 1
        return json.dumps({"ordered": json.loads(body)["order"]}).encode()

    async def asgi(self, scope: Any, receive: Any, send: Any) -> None:
        body = (await receive())["body"]
        key = dict(scope["headers"])[b"idempotency-key"].decode()
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 201, "headers": headers})
        await send({"type": "http.response.body", "body": self.order(key, body)})

    def wsgi(self, environ: Any, start_response: Any) -> list[bytes]:
        body = environ["wsgi.input"].read()
        start_response("201 Created", [("content-type", "application/json")])
        return [self.order(environ["HTTP_IDEMPOTENCY_KEY"], body)]


class Entry(Protocol):
    def post(self, key: str, order: int) -> httpx.Response:
        """Ask for something to be ordered."""


def asked(key: str, order: int) -> dict[str, Any]:
    return {"url": "http://shop/orders", "json": {"order": order}, "headers": {"idempotency-key": key}}


class AsyncEntry:
    """One process of an ASGI app: it has a loop of its own."""

    def __init__(self, shop: Shop, given: object) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._app = asgi.IdempotencyMiddleware(shop.asgi, store=given, scope=SINGLE_TENANT)
        self._client = httpx.AsyncClient(transport=httpx.ASGITransport(self._app))

    def post(self, key: str, order: int) -> httpx.Response:
        return asyncio.run_coroutine_threadsafe(self._client.post(**asked(key, order)), self._loop).result(LONG)

    def close(self) -> None:
        for each in (self._client.aclose(), self._app.store.close()):
            asyncio.run_coroutine_threadsafe(each, self._loop).result(LONG)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class ThreadEntry:
    """One process of a WSGI app."""

    def __init__(self, shop: Shop, given: object) -> None:
        self._app = wsgi.IdempotencyMiddleware(shop.wsgi, store=given, scope=SINGLE_TENANT)
        self._client = httpx.Client(transport=httpx.WSGITransport(self._app))

    def post(self, key: str, order: int) -> httpx.Response:
        return self._client.post(**asked(key, order))

    def close(self) -> None:
        self._client.close()
        self._app.guard.leases.close()
        self._app.store.close()


ENTRIES: dict[str, Callable[[Shop, object], Any]] = {"asgi": AsyncEntry, "wsgi": ThreadEntry}


class Storm:
    """Clients that order, repeat themselves, and mistake one order for another."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.answers: defaultdict[Request, set[Said]] = defaultdict(set)
        self.answered = 0
        self.known: list[Request] = []

    def send(self, entries: list[Entry], key: str, order: int) -> None:
        """Ask until it is known what came of it, as a client does."""
        while True:
            response = random.choice(entries).post(key, order)
            self.answered += 1
            if response.status_code == 409:
                continue
            self.answers[key, order].add((response.status_code, response.headers.get("content-type"), response.content))
            return

    def rage(self, entries: list[Entry], is_over: Callable[[], bool]) -> None:
        """Send new orders and old ones until it is over."""

        def work(worker: int) -> None:
            orders = 0
            while not is_over():
                # Two clients send each new order, at about the same time; and once it is known, any of them.
                mine = f"{worker // 2}-{orders}"
                self._note(entries, mine, orders)
                self.known.append((mine, orders))
                for _ in range(4):
                    self._note(entries, *random.choice(self.known[-200:]))
                self._note(entries, mine, orders + 1)
                orders += 1

        self._in_threads([partial(work, worker) for worker in range(WORKERS)])

    def repeat(self, entries: list[Entry], requests: list[Request]) -> None:
        """Send the same requests as another storm, those for new orders in their order."""
        by_worker: defaultdict[str, list[Request]] = defaultdict(list)
        for request in requests:
            by_worker[request[0].split("-")[0]].append(request)

        def work(mine: list[Request]) -> None:
            for key, order in mine:
                self._note(entries, key, order)

        self._in_threads([partial(work, mine) for mine in by_worker.values()])

    def moves_on(self, requests: int) -> None:
        """Wait until so many more requests have been answered."""
        enough, deadline = self.answered + requests, time.monotonic() + LONG
        while self.answered < enough:
            assert time.monotonic() < deadline, "Nobody is answered any more."
            time.sleep(0.002)

    def _note(self, entries: list[Entry], key: str, order: int) -> None:
        self.requests.append((key, order))
        self.send(entries, key, order)

    @staticmethod
    def _in_threads(calls: list[Callable[[], None]]) -> None:
        with ThreadPoolExecutor(len(calls)) as pool:
            for each in [pool.submit(call) for call in calls]:
                each.result()


@contextmanager
def opened(colour: str, shop: Shop, given: list[object]) -> Iterator[list[Entry]]:
    entries = [ENTRIES[colour](shop, each) for each in given]
    try:
        yield entries
    finally:
        for entry in entries:
            entry.close()


def hits(url: str) -> int:
    """How often Redis has found what it was asked for."""
    with redis.Redis.from_url(url) as client:
        return int(client.info("stats")["keyspace_hits"])


def until_used(storm: Storm, url: str) -> None:
    """Wait until answers come from Redis."""
    before, deadline = hits(url), time.monotonic() + LONG
    while hits(url) < before + 20:
        assert time.monotonic() < deadline, "Nothing comes from Redis."
        storm.moves_on(20)


Fault = Callable[[Storm], None]


def survives(colour: str, postgres_url: str, cache: str, fault: Fault) -> None:
    """Let a storm rage while *fault* happens to the cache, then ask PostgreSQL alone the same, and compare."""
    alone = f"{postgres_url}?table=alone"
    for url in (postgres_url, alone):
        with closing(stores.store(url)) as store:
            store.migrate()
    shop, storm = Shop(), Storm()
    over = threading.Event()
    # One process that keeps much, and one that has to ask Redis each time.
    tiers: list[object] = [Tiered(postgres_url, cache), Tiered(postgres_url, cache, memory=0)]
    with opened(colour, shop, tiers) as entries, ThreadPoolExecutor(1) as pool:
        raging = pool.submit(storm.rage, entries, over.is_set)
        try:
            fault(storm)
        finally:
            over.set()
        raging.result()
    known_shop, known = Shop(), Storm()
    with opened(colour, known_shop, [alone]) as entries:
        known.repeat(entries, storm.requests)
    assert storm.answers == known.answers
    assert all(len(said) == 1 for said in storm.answers.values())
    assert {status for said in storm.answers.values() for status, _, _ in said} == {201, 422}
    assert shop.effects == known_shop.effects
    assert set(shop.effects.values()) == {1}


@pytest.mark.parametrize("colour", ["asgi", pytest.param("wsgi", marks=pytest.mark.slow)])
def test_killed(colour: str, postgres_url: str) -> None:
    """Redis is killed, and started again, and killed again."""
    with servers.redis() as server:

        def fault(storm: Storm) -> None:
            for _ in range(2):
                until_used(storm, server.url)
                server.kill()
                storm.moves_on(150)
                server.start()
            until_used(storm, server.url)

        survives(colour, postgres_url, server.url, fault)


@pytest.mark.parametrize("colour", ["asgi", pytest.param("wsgi", marks=pytest.mark.slow)])
def test_stopped(colour: str, postgres_url: str) -> None:
    """Redis hangs, and goes on, and hangs again."""
    with servers.redis() as server:

        def fault(storm: Storm) -> None:
            for _ in range(2):
                until_used(storm, server.url)
                os.kill(server.pid, signal.SIGSTOP)
                try:
                    storm.moves_on(150)
                finally:
                    os.kill(server.pid, signal.SIGCONT)
            until_used(storm, server.url)

        survives(colour, postgres_url, server.url, fault)


def test_flushed(postgres_url: str) -> None:
    """Redis is emptied again and again."""
    with servers.redis() as server:

        def fault(storm: Storm) -> None:
            until_used(storm, server.url)
            with redis.Redis.from_url(server.url) as client:
                for _ in range(100):
                    client.flushall()
                    storm.moves_on(2)
            until_used(storm, server.url)

        survives("asgi", postgres_url, server.url, fault)


def test_full(postgres_url: str) -> None:
    """Redis is full, and refuses to take more; then it has room again."""
    with servers.redis() as server:

        def fault(storm: Storm) -> None:
            until_used(storm, server.url)
            with redis.Redis.from_url(server.url) as client:
                client.config_set("maxmemory", "1")
                storm.moves_on(200)
                assert client.info("errorstats")["errorstat_OOM"]["count"] > 0
                client.config_set("maxmemory", "0")
                before = client.dbsize()
                while client.dbsize() <= before:
                    storm.moves_on(20)
            until_used(storm, server.url)

        survives("asgi", postgres_url, server.url, fault)


def test_evicting(postgres_url: str) -> None:
    """Redis is full, and forgets what was not asked for."""
    with servers.redis(settings={"maxmemory": "3mb", "maxmemory-policy": "allkeys-lru"}) as server:

        def fault(storm: Storm) -> None:
            until_used(storm, server.url)
            with redis.Redis.from_url(server.url) as client:
                number = 0
                while client.info("stats")["evicted_keys"] < 1000:
                    for _ in range(20):
                        client.set(f"filler {number}", bytes(10_000))
                        number += 1
                    storm.moves_on(1)
            storm.moves_on(100)

        survives("asgi", postgres_url, server.url, fault)


@pytest.mark.slow
def test_failed_over(postgres_url: str) -> None:
    """The master is lost, and a replica takes its place."""
    with servers.redis_sentinel() as watched:

        def fault(storm: Storm) -> None:
            master = watched.master()
            until_used(storm, master.url)
            master.kill()
            deadline = time.monotonic() + LONG
            while watched.master().port == master.port:
                assert time.monotonic() < deadline
                storm.moves_on(10)
            until_used(storm, watched.master().url)

        survives("asgi", postgres_url, watched.url, fault)


def test_restarted_with_old_data(postgres_url: str) -> None:
    """Redis is away for a while, and comes back with what it had."""
    with servers.redis(settings={"appendonly": "yes", "appendfsync": "always"}) as server:

        def fault(storm: Storm) -> None:
            until_used(storm, server.url)
            server.kill()
            storm.moves_on(150)
            server.start()
            with redis.Redis.from_url(server.url) as client:
                assert client.dbsize() > 0
            until_used(storm, server.url)

        survives("asgi", postgres_url, server.url, fault)
