"""The PostgreSQL stores through PgBouncer in transaction mode, with two server connections for everybody: all that
holds on a server holds there.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, contextmanager
from datetime import timedelta
from typing import Any
from wsgiref.types import StartResponse, WSGIEnvironment

import asyncpg
import psycopg
import psycopg_pool
import pytest
from sqlalchemy import create_engine
from starlette.applications import Starlette
from starlette.requests import Request as StarletteRequest
from starlette.responses import PlainTextResponse
from starlette.routing import Route

import semel
import semel.asgi
import semel.wsgi
from semel import Policy, stores
from semel.core.commands import Again, Claim, Complete, Verdict
from semel.core.message import Answer
from semel.core.record import Found, Hold
from semel.core.state import Event
from semel.errors import StoreUnavailable
from semel.stores.connections.asyncpg import AsyncpgConnections
from semel.stores.connections.psycopg import AsyncPsycopgConnections, PsycopgConnections
from semel.stores.connections.sqlalchemy import SQLAlchemyConnections
from semel.stores.postgres import async_store, pooler
from semel.stores.postgres.address import SESSION
from semel.stores.postgres.async_store import AsyncPostgresStore
from semel.stores.postgres.errors import is_too_slow
from semel.stores.postgres.store import PostgresStore
from semel.testing.conformance import Candidate, StoreConformance
from tests.kit import servers
from tests.stores.connections.lending import DRIVERS, Kind, Lender, record, rows
from tests.stores.connections.lending import SCHEMA as TWO_TABLES
from tests.stores.shared.test_conformance import postgres_candidate
from tests.web.harness import HANG_SECONDS, Request, Response, call_asgi, call_wsgi

LEASE, RETENTION = timedelta(seconds=30), timedelta(hours=24)
ANSWER = Answer(201, ((b"content-type", b"application/json"),), b'{"id": 1}')

#: Of the kinds of connections, those that the store opens itself.
OURS = ("psycopg", "asyncpg")


@asynccontextmanager
async def their_psycopg(url: str) -> AsyncIterator[Lender]:
    kwargs = {"prepare_threshold": None}
    with psycopg_pool.ConnectionPool(url, kwargs=kwargs, min_size=0, max_size=2, open=True) as pool:
        yield Lender(PsycopgConnections.of(pool), is_sqlalchemy=False)


@asynccontextmanager
async def their_async_psycopg(url: str) -> AsyncIterator[Lender]:
    kwargs = {"prepare_threshold": None}
    pool = psycopg_pool.AsyncConnectionPool(url, kwargs=kwargs, min_size=0, max_size=2, open=False)
    async with pool:
        yield Lender(AsyncPsycopgConnections.of(pool), is_sqlalchemy=False)


@asynccontextmanager
async def their_asyncpg(url: str) -> AsyncIterator[Lender]:
    async with asyncpg.create_pool(url, min_size=0, max_size=2, statement_cache_size=0) as pool:
        yield Lender(AsyncpgConnections.of(pool), is_sqlalchemy=False)


@asynccontextmanager
async def their_engine(url: str) -> AsyncIterator[Lender]:
    address = url.replace("postgresql:", "postgresql+psycopg:", 1)
    engine = create_engine(address, pool_size=2, max_overflow=0, connect_args={"prepare_threshold": None})
    yield Lender(SQLAlchemyConnections(engine), is_sqlalchemy=True)
    await asyncio.to_thread(engine.dispose)


#: A pool of the application's is set up by it, as its own statements need it.
KINDS: dict[str, Kind] = {
    **{name: DRIVERS[name] for name in OURS},
    "psycopg pool": their_psycopg,
    "psycopg async pool": their_async_psycopg,
    "asyncpg pool": their_asyncpg,
    "engine psycopg": their_engine,
}


@pytest.mark.slow  # The store of shared/test_conformance.py; what a pooler changes is tested below.
class TestPgBouncer(StoreConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def candidate(
        cls, postgres_server: servers.PostgresServer, pgbouncer_server: servers.PgBouncer
    ) -> Iterator[Candidate]:
        yield from postgres_candidate(postgres_server, lambda url: stores.store(pgbouncer_server.through(url)))


@pytest.mark.slow  # The store of shared/test_conformance.py; what a pooler changes is tested below.
class TestAsyncPgBouncer(StoreConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def candidate(
        cls, postgres_server: servers.PostgresServer, pgbouncer_server: servers.PgBouncer
    ) -> Iterator[Candidate]:
        yield from postgres_candidate(postgres_server, lambda url: stores.async_store(pgbouncer_server.through(url)))


@pytest.fixture
def url(pgbouncer_url: str) -> str:
    """A database with Semel's tables, made through PgBouncer too."""
    store = PostgresStore(pgbouncer_url)
    assert store.migrate()
    store.close()
    return pgbouncer_url


def claim(key: str) -> Claim:
    return Claim("alice", key, os.urandom(16), b"fingerprint", LEASE, RETENTION)


def done(hold: Hold | Found | Again) -> Complete:
    assert isinstance(hold, Hold)
    return Complete(hold, Event.COMPLETE, ANSWER)


def left_prepared(url: str) -> list[Any]:
    """The prepared statements of every server connection that PgBouncer has to this database."""
    with ExitStack() as ends:
        found = []
        for _ in range(2):
            connection = ends.enter_context(psycopg.connect(url, prepare_threshold=None))
            found += connection.execute("SELECT name FROM pg_prepared_statements").fetchall()
        return found


class TestTelling:
    def test_pooler_is_told_from_a_server(self, postgres_url: str, url: str) -> None:
        """A store knows from its first command on whether there is a pooler before its server."""
        for each, is_direct in ((postgres_url, True), (url, False)):
            with PostgresStore(each) as store:
                assert store.is_direct is None
                store.perform(claim("k"))
                assert store.is_direct is is_direct

    async def test_pooler_is_told_from_a_server_on_a_loop(self, postgres_url: str, url: str) -> None:
        """So does one on an event loop."""
        for each, is_direct in ((postgres_url, True), (url, False)):
            async with AsyncPostgresStore(each) as store:
                await store.perform(claim("k"))
                assert store.is_direct is is_direct

    async def test_pooler_that_takes_all_settings(self, postgres_server: servers.PostgresServer, url: str) -> None:
        """A pooler that swallows the settings of a session, instead of refusing them, is known for what it is too."""
        swallowed = ", ".join(["options", *SESSION])
        with servers.pgbouncer(postgres_server, settings={"ignore_startup_parameters": swallowed}) as bouncer:
            other_url = bouncer.through(url)
            with PostgresStore(other_url) as store:
                assert isinstance(await asyncio.to_thread(store.perform, claim("sync")), Hold)
                assert store.is_direct is False
            async with AsyncPostgresStore(other_url) as other:
                await other.perform(done(await other.perform(claim("async"))))
                assert other.is_direct is False
            assert left_prepared(other_url) == []

    @pytest.mark.parametrize("tag, is_direct", [("SELECT 1", True), ("SELECT 0", False), (None, False)])
    def test_tag(self, tag: str | None, is_direct: bool) -> None:
        """The answer is in the command tag, so that no statement has to be prepared to read it."""
        assert pooler.is_yes(tag) is is_direct
        assert pooler.question(-7) == "SELECT WHERE pg_backend_pid() = -7"


class TestSession:
    def test_nothing_is_left_in_a_session(self, url: str) -> None:
        """What the next client finds on a connection is no prepared statement and no setting of ours."""
        with PostgresStore(url) as store:
            for number in range(10):
                store.perform(done(store.perform(claim(f"sync {number}"))))

        async def on_a_loop() -> None:
            async with AsyncPostgresStore(url) as other:
                for number in range(10):
                    await other.perform(done(await other.perform(claim(f"async {number}"))))

        asyncio.run(on_a_loop())

        assert left_prepared(url) == []
        with psycopg.connect(url, prepare_threshold=None) as connection:
            shown = [connection.execute(f"SHOW {name}".encode()).fetchall()[0][0] for name in ("lock_timeout", "jit")]
        assert shown == ["0", "on"]

    def test_locked_row_holds_nobody_up_for_long(self, url: str, postgres_url: str) -> None:
        """The time limits of a statement hold without a session to set them in."""
        with PostgresStore(url) as store, psycopg.connect(postgres_url) as operator:
            store.perform(claim("k"))
            operator.execute("DELETE FROM semel_keys")
            with pytest.raises(StoreUnavailable, match="lock timeout"):
                store.perform(claim("k"))

    async def test_locked_row_holds_nobody_up_for_ever_on_a_loop(
        self, url: str, postgres_url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """On an event loop it is the driver that waits no longer, once: the same statement would only wait again."""
        monkeypatch.setattr(async_store, "STATEMENT_SECONDS", 1)
        async with AsyncPostgresStore(url) as store:
            await store.perform(claim("k"))
            claims = store._links[0]
            operator = await asyncpg.connect(postgres_url)
            async with operator.transaction():
                await operator.execute("DELETE FROM semel_keys")
                seen: list[str] = []
                assert claims._connection
                claims._connection.add_query_logger(lambda sent: seen.append(sent.query))
                with pytest.raises(StoreUnavailable) as caught:
                    await store.perform(claim("k"))
            await operator.close()
        assert isinstance(caught.value.__cause__, TimeoutError)
        assert caught.value.was_sent
        assert len(seen) == 1


class TestShortage:
    @pytest.fixture
    def single(self, postgres_server: servers.PostgresServer, url: str) -> Iterator[str]:
        """The URL of the same database through a PgBouncer with one connection and little patience."""
        with servers.pgbouncer(postgres_server, pool_size=1, settings={"query_wait_timeout": "1"}) as bouncer:
            yield bouncer.through(url)

    @contextmanager
    def taken(self, single: str) -> Iterator[None]:
        with psycopg.connect(single, prepare_threshold=None) as other:
            other.execute("SELECT 1")
            yield

    def test_no_connection_to_give(self, single: str) -> None:
        """A statement that PgBouncer had no connection for is not sent again: it would only wait as long again."""
        with PostgresStore(single) as store:
            store.perform(claim("before"))
            with self.taken(single), pytest.raises(StoreUnavailable, match="query_wait_timeout") as caught:
                store.perform(claim("while"))
            assert is_too_slow(caught.value)
            assert isinstance(store.perform(claim("after")), Hold)

    async def test_no_connection_to_give_on_a_loop(self, single: str) -> None:
        """Nor is it on an event loop."""
        async with AsyncPostgresStore(single) as store:
            await store.perform(claim("before"))
            with self.taken(single), pytest.raises(StoreUnavailable, match="query_wait_timeout") as caught:
                await store.perform(claim("while"))
            assert is_too_slow(caught.value)
            await store.perform(done(await store.perform(claim("after"))))


class TestRivals:
    def test_claims_through_it_and_beside_it(self, url: str, postgres_url: str) -> None:
        """Of rivals in both colours, some through PgBouncer and some not, one wins each key, and none fails."""
        keys = [f"k{number}" for number in range(40)]

        def in_threads(each: str) -> list[Any]:
            with PostgresStore(each) as store, ThreadPoolExecutor(8) as threads:
                return list(threads.map(lambda key: store.perform(claim(key)), keys))

        async def on_a_loop(each: str) -> list[Any]:
            async with AsyncPostgresStore(each) as store:
                return await asyncio.gather(*[store.perform(claim(key)) for key in reversed(keys)])

        with ThreadPoolExecutor() as rivals:
            racing = [rivals.submit(in_threads, each) for each in (url, postgres_url) for _ in range(2)]
            racing += [rivals.submit(asyncio.run, on_a_loop(each)) for each in (url, postgres_url) for _ in range(2)]
            got = [each for race in racing for each in race.result()]

        assert sum(isinstance(each, Hold) for each in got) == len(keys)
        assert all(isinstance(each, Hold | Found | Again) for each in got)


class TestOutage:
    @pytest.fixture
    def bouncer(self, postgres_server: servers.PostgresServer) -> Iterator[servers.PgBouncer]:
        with servers.pgbouncer(postgres_server) as started:
            yield started

    def test_store_comes_back(self, bouncer: servers.PgBouncer, url: str) -> None:
        """A store survives PgBouncer's crash: it fails while it is down, and works when it is up again."""
        with PostgresStore(bouncer.through(url)) as store:
            assert store.perform(done(store.perform(claim("before")))) is Verdict.DONE
            bouncer.kill()
            with pytest.raises(StoreUnavailable):
                store.perform(claim("while"))
            bouncer.start()
            assert isinstance(store.perform(claim("before")), Found)
            assert isinstance(store.perform(claim("after")), Hold)

    async def test_store_comes_back_on_a_loop(self, bouncer: servers.PgBouncer, url: str) -> None:
        """So does one on an event loop."""
        async with AsyncPostgresStore(bouncer.through(url)) as store:
            assert await store.perform(done(await store.perform(claim("before")))) is Verdict.DONE
            await asyncio.to_thread(bouncer.kill)
            with pytest.raises(StoreUnavailable):
                await store.perform(claim("while"))
            await asyncio.to_thread(bouncer.start)
            before, after = [await store.perform(claim(key)) for key in ("before", "after")]
            assert isinstance(before, Found)
            assert isinstance(after, Hold)

    @pytest.mark.parametrize("kind", OURS)
    async def test_transactions_come_back(self, bouncer: servers.PgBouncer, postgres_url: str, kind: str) -> None:
        """A transaction that PgBouncer takes down with it has written nothing; the next ones are good."""
        with psycopg.connect(postgres_url, autocommit=True) as connection:
            connection.execute(TWO_TABLES.encode(), prepare=False)
        async with DRIVERS[kind](bouncer.through(postgres_url)) as lender:
            lent = await lender.begin()
            await lent.execute("INSERT INTO rides VALUES (1)")
            await asyncio.to_thread(bouncer.kill)
            with pytest.raises(StoreUnavailable):
                await lent.run(record("lost"))
            await lent.rollback()
            await asyncio.to_thread(bouncer.start)
            await two_at_once(lender)
        assert await rows(postgres_url, "SELECT id FROM rides") == []
        assert sorted(await rows(postgres_url, "SELECT key FROM records")) == ["0", "1"]


async def two_at_once(lender: Lender) -> None:
    lents = [await lender.begin() for _ in range(2)]
    for number, lent in enumerate(lents):
        assert await lent.run(record(str(number))) == [str(number)]
        await lent.commit()


class TestTransactions:
    @pytest.mark.parametrize("kind", KINDS)
    async def test_both_or_neither(self, pgbouncer_url: str, kind: str) -> None:
        """A handler's write and its record commit together, on whichever connection they are lent."""
        with psycopg.connect(pgbouncer_url, autocommit=True, prepare_threshold=None) as connection:
            connection.execute(TWO_TABLES.encode(), prepare=False)
        async with KINDS[kind](pgbouncer_url) as lender:
            for number in range(20):
                lents = [await lender.begin(), await lender.begin()]
                for place, lent in enumerate(lents):
                    await lent.execute(f"INSERT INTO rides VALUES ({2 * number + place})")
                    await lent.run(record(f"{number} {place}"))
                await lents[number % 2].commit()
                await lents[1 - number % 2].rollback()
            with psycopg.connect(pgbouncer_url, prepare_threshold=None) as connection:
                written = connection.execute("SELECT id FROM rides ORDER BY id").fetchall()
                kept = connection.execute("SELECT count(*) FROM records").fetchall()
        assert written == [(2 * number + number % 2,) for number in range(20)]
        assert kept == [(20,)]
        assert left_prepared(pgbouncer_url) == []

    @pytest.mark.parametrize("kind", OURS)
    async def test_what_a_handler_sets_ends_with_it(self, pgbouncer_url: str, kind: str) -> None:
        """A setting that a handler has changed is nobody else's."""
        async with DRIVERS[kind](pgbouncer_url) as lender:
            lent = await lender.begin()
            await lent.execute("SET work_mem = '7MB'")
            await lent.commit()
        with psycopg.connect(pgbouncer_url, prepare_threshold=None) as connection:
            assert connection.execute("SHOW work_mem").fetchall() == [("4MB",)]


class Shop:
    """A handler that writes, behind either entry point. It fails in the middle as often as the test says."""

    def __init__(self, url: str, *, is_atomic: bool) -> None:
        self.url = url
        self.is_atomic = is_atomic
        self.failures = 0
        self.charged: list[str] = []
        self._lock = threading.Lock()
        with psycopg.connect(url, autocommit=True, prepare_threshold=None) as connection:
            connection.execute("CREATE TABLE payments (key text NOT NULL, step text NOT NULL)")

    @property
    def settings(self) -> dict[str, Any]:
        mode = Policy.ietf(mode="atomic") if self.is_atomic else Policy.ietf()
        return {"scope": lambda _: "alice", "policy": mode, "store": self.url}

    @property
    def payments(self) -> list[Any]:
        with psycopg.connect(self.url, prepare_threshold=None) as connection:
            return connection.execute("SELECT key, step FROM payments ORDER BY key, step").fetchall()

    @staticmethod
    def insert(step: str) -> str:
        return f"INSERT INTO payments (key, step) VALUES ('{semel.current().key}', '{step}')"

    def charge(self, *, idempotency_key: str) -> str:
        with self._lock:
            self.charged.append(idempotency_key)
            if self.failures:
                self.failures -= 1
                raise semel.NoEffect("the provider is away")
        return idempotency_key

    async def serve_async(self, request: StarletteRequest) -> PlainTextResponse:
        operation = semel.current()
        if self.is_atomic:
            await operation.connection.execute(self.insert("paid"))
            return PlainTextResponse("paid", 201)

        async def write(connection: Any, step: str) -> None:
            await connection.execute(self.insert(step))

        await operation.phase("created", write, "created")
        await operation.effect("charged", semel.in_thread(self.charge))
        await operation.phase("paid", write, "paid")
        return PlainTextResponse("paid", 201)

    def serve(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        operation = semel.current()
        if self.is_atomic:
            operation.connection.execute(self.insert("paid"))
        else:

            def write(connection: Any, step: str) -> None:
                connection.execute(self.insert(step))

            operation.phase("created", write, "created")
            operation.effect("charged", self.charge)
            operation.phase("paid", write, "paid")
        start_response("201 Created", [("Content-Type", "text/plain")])
        return [b"paid"]


def asked(key: str) -> Request:
    return Request(lines=(("Idempotency-Key", key.encode()),), body=b"5")


Send = Callable[[list[str]], list[Response]]


@contextmanager
def wsgi(shop: Shop) -> Iterator[Send]:
    app = semel.wsgi.IdempotencyMiddleware(shop.serve, **shop.settings)
    with app.store, ThreadPoolExecutor(16) as threads:
        yield lambda keys: list(threads.map(lambda key: call_wsgi(app, asked(key)), keys))


@contextmanager
def asgi(shop: Shop) -> Iterator[Send]:
    @asynccontextmanager
    async def opened() -> AsyncIterator[Any]:
        routes = Starlette(routes=[Route("/pay", shop.serve_async, methods=["POST"])])
        app = semel.asgi.IdempotencyMiddleware(routes, **shop.settings)
        async with app.store:
            yield app

    async def send(app: Any, keys: list[str]) -> list[Response]:
        async with asyncio.timeout(HANG_SECONDS):
            return await asyncio.gather(*[call_asgi(app, asked(key)) for key in keys])

    with asyncio.Runner() as runner:
        entered = opened()
        app = runner.run(entered.__aenter__())
        try:
            yield lambda keys: runner.run(send(app, keys))
        finally:
            runner.run(entered.__aexit__(None, None, None))


@pytest.mark.parametrize("entry", [asgi, wsgi])
class TestEntries:
    def test_atomic(self, url: str, entry: Callable[[Shop], Any]) -> None:
        """Sixty requests at once on twenty keys, over two server connections, are twenty payments with an answer."""
        shop = Shop(url, is_atomic=True)
        keys = [f"key-{number}" for number in range(20)]
        with entry(shop) as send:
            first = send(keys * 3)
            again = send(keys)

        assert {response.status for response in first} <= {201, 409}
        assert [(response.status, response.is_replay) for response in again] == [(201, True)] * 20
        assert shop.payments == [(key, "paid") for key in sorted(keys)]
        assert left_prepared(url) == []

    def test_phases(self, url: str, entry: Callable[[Shop], Any]) -> None:
        """An operation that failed in the middle goes on from there, and repeats no phase."""
        shop = Shop(url, is_atomic=False)
        shop.failures = 5
        keys = [f"key-{number}" for number in range(10)]
        with entry(shop) as send:
            first = send(keys)
            again = send(keys)
            replayed = send(keys)

        assert sorted(response.status < 300 for response in first) == [False] * 5 + [True] * 5
        assert {response.status for response in again} == {201}
        assert all(response.is_replay for response in replayed)
        assert shop.payments == [(key, step) for key in sorted(keys) for step in ("created", "paid")]
        assert len(shop.charged) == 15
        assert len(set(shop.charged)) == 10
