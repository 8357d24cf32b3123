"""Migrations of tables that are in use: what becomes of one that waits, is interrupted, or is run twice at once; and of
the requests meanwhile. What each statement locks is in ``test_locks.py``.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from datetime import timedelta
from functools import partial
from itertools import chain, count
from typing import Any

import psycopg
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

import semel
import semel.asgi
import semel.wsgi
from semel import Policy, stores
from semel.core.commands import Begin, Claim, Undo
from semel.core.record import Hold
from semel.errors import ConfigurationError, StoreNotReady, StoreUnavailable
from semel.stores.migration import Book
from semel.stores.postgres import migrating
from semel.stores.postgres.address import Address
from semel.stores.postgres.migrating import Migrator
from semel.stores.postgres.statements import PACKAGE
from semel.stores.postgres.store import PostgresStore, _MigratingSession
from semel.stores.statement import Names, load_migrations
from tests.kit.servers.base import until
from tests.web.harness import Request, Response, call_asgi, call_wsgi

KNOWN = [name for name, _ in load_migrations(PACKAGE, Names())]


#: What a next version may bring.
NEXT = (
    "9001_pre_next",
    """
    -- A column that only new code writes.
    ALTER TABLE semel_keys ADD COLUMN colour text;
    CREATE TABLE semel_keys_colours (name text PRIMARY KEY, lock text, statement text);
    INSERT INTO semel_keys_colours
    SELECT 'red', current_setting('lock_timeout'), current_setting('statement_timeout');
    CREATE INDEX CONCURRENTLY semel_keys_colour ON semel_keys (colour) WHERE colour IS NOT NULL;
    -- old code: it leaves the column empty
    ALTER TABLE semel_keys ADD CONSTRAINT semel_keys_colour CHECK (colour <> '') NOT VALID;
    ALTER TABLE semel_keys VALIDATE CONSTRAINT semel_keys_colour;
    """,
)
#: What it may take away, once no old code is left.
AFTER = ("9002_post_after", "ALTER TABLE semel_keys DROP COLUMN milestone;")
#: An index, behind what does not wait for those who use the table.
INDEX = (
    "9001_pre_index",
    "CREATE TABLE semel_keys_new (a text); CREATE INDEX CONCURRENTLY semel_keys_colour ON semel_keys (owner);",
)
#: How many requests a worker sends before and after.
EACH = 8
#: Only what can be part of a transaction.
SIMPLE = ("9001_pre_simple", "ALTER TABLE semel_keys ADD COLUMN a text; ALTER TABLE semel_keys ADD COLUMN b text;")


@pytest.fixture
def bring(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Have the migrations of this version, and others: only what migrates knows of them, and no other code."""

    def bring(*more: tuple[str, str], without: int = 0) -> None:
        def load(package: str, names: Names) -> list[tuple[str, str]]:
            known = load_migrations(package, names)
            return known[: len(known) - without] + [(name, names.put_into(sql)) for name, sql in more]

        monkeypatch.setattr(migrating, "load_migrations", load)

    return bring


@pytest.fixture
def postgres_url(migrated_postgres_url: str) -> str:
    return migrated_postgres_url


@pytest.fixture
def server(postgres_url: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(postgres_url, autocommit=True, application_name="report") as connection:
        yield connection


def migrate(url: str, *, post: bool = False) -> list[str]:
    with closing(stores.store(url)) as store:
        store.migrates_post = post
        return store.migrate()


def claim(key: str) -> Claim:
    return Claim("alice", key, os.urandom(16), b"fingerprint", timedelta(seconds=30), timedelta(hours=1))


class TestRunning:
    def test_statement_by_statement(self, postgres_url: str, server: psycopg.Connection[Any], bring: Any) -> None:
        """Statements are run in order, without a limit for their own time, and with one for the wait for a lock."""
        bring(NEXT)
        with closing(PostgresStore(postgres_url)) as store:
            (planned,) = store.plan()
            assert [each.lock for each in planned.statements][:2] == ["ACCESS EXCLUSIVE", "ACCESS EXCLUSIVE"]
            assert store.migrate() == [NEXT[0]]
            assert store.plan() == ()
        assert server.execute("SELECT * FROM semel_keys_colours").fetchall() == [("red", "2s", "0")]
        assert _valid(server) == [True]
        assert NEXT[0] in _book(server).names

    def test_post(self, postgres_url: str, empty_postgres_url: str, bring: Any) -> None:
        """What old code does not survive is run when it is asked for; a new store has no old code."""
        bring(NEXT, AFTER)
        assert migrate(postgres_url) == [NEXT[0]]
        assert migrate(postgres_url) == []
        assert migrate(postgres_url, post=True) == [AFTER[0]]
        assert migrate(empty_postgres_url) == [*KNOWN, NEXT[0], AFTER[0]]

    def test_several_at_once(self, postgres_url: str, server: psycopg.Connection[Any], bring: Any) -> None:
        """Of several that migrate at once, each migration is run by one; and none is in the way of an index that
        another makes CONCURRENTLY.
        """
        bring(NEXT, AFTER)
        with ThreadPoolExecutor(4) as threads:
            runs = list(threads.map(lambda _: migrate(postgres_url, post=True), range(4)))
        assert sorted(chain(*runs)) == [NEXT[0], AFTER[0]]
        assert server.execute("SELECT count(*) FROM semel_keys_colours").fetchall() == [(1,)]

    @pytest.mark.slow  # It migrates some sixty times.
    def test_interrupted_anywhere(
        self, postgres_url: str, server: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Wherever a migrator dies, the next one goes on from there, and nothing is run twice or left out."""
        monkeypatch.setattr(migrating, "POLL_SECONDS", 0.005)
        address, first = Address.of(postgres_url), load_migrations(PACKAGE, Names())[0]

        def migrate(session: Any, names: Names, *migrations: tuple[str, str]) -> None:
            migrator = Migrator(session, names, "here")
            migrator._migrations = [(name, names.put_into(script)) for name, script in migrations]
            with session:
                migrator.run()

        for point in count(1):
            names = Names("k", f"s{point}")
            migrate(_MigratingSession(address), names, first)
            is_alive = False
            with suppress(_Killed):
                migrate(_Mortal(address, point), names, first, NEXT)
                is_alive = True
            migrate(_MigratingSession(address), names, first, NEXT)
            found = server.execute(f"SELECT count(*), min(statement) FROM {names.schema}.k_colours".encode()).fetchall()
            assert found == [(1, "0")], point
            assert _valid(server, f"{names.schema}.k_colour") == [True], point
            book = server.execute(f"SELECT name FROM {names.schema}.k_migrations".encode()).fetchall()
            assert sorted(name for (name,) in book) == [first[0], NEXT[0]], point
            if is_alive:
                break
        assert point > 40  # So many calls there are.

    @pytest.mark.slow  # It starts a process.
    def test_killed(self, postgres_url: str, server: psycopg.Connection[Any], bring: Any) -> None:
        """A process that is killed while it makes an index leaves what the next run goes on with."""
        bring(INDEX)
        code = (
            "import sys\nfrom semel.stores.postgres import migrating, store\nload = migrating.load_migrations\n"
            f"migrating.load_migrations = lambda *a: [*load(*a), {INDEX!r}]\nstore.PostgresStore(sys.argv[1]).migrate()"
        )
        with psycopg.connect(postgres_url) as other:
            other.execute("DELETE FROM semel_keys")
            process = subprocess.Popen([sys.executable, "-c", code, postgres_url])
            try:
                until("the index is begun", lambda: _valid(server) == [False])
            finally:
                process.send_signal(signal.SIGKILL)
                process.wait()
        assert migrate(postgres_url) == [INDEX[0]]
        assert _valid(server) == [True]

    def test_invalid_index(self, postgres_url: str, server: psycopg.Connection[Any], bring: Any) -> None:
        """An index that an interrupted run has left invalid is dropped, and made again."""
        bring(INDEX)
        with psycopg.connect(postgres_url) as other, ThreadPoolExecutor() as threads:
            other.execute("DELETE FROM semel_keys")
            run = threads.submit(migrate, postgres_url)
            until("the index is begun", lambda: _valid(server) == [False])
            server.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE '%INDEX CONCURRENTLY%'"
                " AND pid <> pg_backend_pid()"
            )
            with pytest.raises(StoreUnavailable):
                run.result()
        assert _valid(server) == [False]
        assert _book(server).half == ((INDEX[0], 1),)
        assert migrate(postgres_url) == [INDEX[0]]
        assert _valid(server) == [True]

    def test_no_schema(self, empty_postgres_url: str) -> None:
        """Where the role's search path leads to no schema, that is what is said; and nothing is made."""
        with pytest.raises(ConfigurationError, match=r"no schema to make tables in.*\?schema=NAME"):
            migrate(f"{empty_postgres_url}?options=-csearch_path%3Dnowhere")
        assert migrate(empty_postgres_url) == KNOWN

    def test_in_the_way(
        self,
        postgres_url: str,
        server: psycopg.Connection[Any],
        monkeypatch: pytest.MonkeyPatch,
        bring: Any,
    ) -> None:
        """A statement that does not get its lock gives up after some tries, and says who has it; the next run goes on
        at that statement.
        """
        bring(NEXT)
        monkeypatch.setattr(migrating, "LOCK_SECONDS", 0.3)
        monkeypatch.setattr(migrating, "WATCH_SECONDS", 0.01)
        monkeypatch.setattr(migrating, "PAUSES", (0.0, 0.0, 0.0))
        with server.transaction():
            server.execute("SELECT FROM semel_keys")
            with pytest.raises(StoreUnavailable) as refused:
                migrate(postgres_url)
        said = str(refused.value)
        assert "9001_pre_next, statement 1 of 6, needs ACCESS EXCLUSIVE on semel_keys" in said
        assert f"pid {server.info.backend_pid} (application report, idle in transaction, its transaction is" in said
        assert migrate(postgres_url) == [NEXT[0]]

    def test_requests_go_on_between(
        self,
        postgres_url: str,
        server: psycopg.Connection[Any],
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
        bring: Any,
    ) -> None:
        """While a transaction is in the way, keys are claimed between the tries; when it ends, the migration does."""
        bring(NEXT)
        monkeypatch.setattr(migrating, "LOCK_SECONDS", 0.1)
        monkeypatch.setattr(migrating, "PAUSES", (0.1,) * 1000)
        with ThreadPoolExecutor() as threads, closing(PostgresStore(postgres_url)) as store:
            with server.transaction():
                server.execute("SELECT FROM semel_keys")
                run = threads.submit(migrate, postgres_url)
                until("it has tried", lambda: caplog.text.count("Trying again") > 1)
                assert isinstance(store.perform(claim("meanwhile")), Hold)
                assert not run.done()
            assert run.result() == [NEXT[0]]


class TestPgBouncer:
    def test_concurrently(self, postgres_url: str, pgbouncer_url: str, empty_postgres_url: str, bring: Any) -> None:
        """Through a pooler an index that needs a session of its own is refused before anything is changed."""
        bring(SIMPLE, ("9002_pre_next", NEXT[1]))
        with pytest.raises(ConfigurationError, match="reached through a pooler, and 9002_pre_next makes an index"):
            migrate(pgbouncer_url)
        assert migrate(postgres_url) == [SIMPLE[0], "9002_pre_next"]
        assert migrate(pgbouncer_url) == []

    def test_simple(self, pgbouncer_url: str, server: psycopg.Connection[Any], bring: Any) -> None:
        """What can be part of a transaction is run through a pooler, by several at once, each statement by one."""
        bring(SIMPLE)
        with ThreadPoolExecutor(3) as threads:
            runs = list(threads.map(lambda _: migrate(pgbouncer_url), range(3)))
        assert list(chain(*runs)) == [SIMPLE[0]]
        assert server.execute("SELECT a, b FROM semel_keys").fetchall() == []


class TestVersions:
    def test_older(self, empty_postgres_url: str, bring: Any, caplog: pytest.LogCaptureFixture) -> None:
        """A store that is one migration behind serves without what that one brings, and says what is missing; or it is
        refused in one line with what to run.
        """
        bring(without=1)
        migrate(empty_postgres_url)
        try:
            with PostgresStore(empty_postgres_url) as store:
                assert isinstance(store.perform(claim("k")), Hold)
        except StoreNotReady as refused:
            assert "Run: semel migrate" in str(refused)  # noqa: PT017 - either of the two
        else:
            assert f"lacks {KNOWN[-1]}. What needs it is refused until you run: semel migrate" in caplog.text

    async def test_newer(self, postgres_url: str, bring: Any, caplog: pytest.LogCaptureFixture) -> None:
        """Code serves on tables that a newer version has added to, and not on those that it has taken from."""
        bring(NEXT)
        migrate(postgres_url)
        with PostgresStore(postgres_url) as store:
            assert isinstance(store.perform(claim("k")), Hold)
        assert not caplog.text
        bring(NEXT, ("9002_post_harmless", "ALTER TABLE semel_keys SET (fillfactor = 41)"))
        migrate(postgres_url, post=True)
        said = r"too old \(9002_post_harmless\)\. Run: pip install --upgrade semel"
        with pytest.raises(StoreNotReady, match=said):
            PostgresStore(postgres_url).open()
        on_a_loop = stores.async_store(postgres_url)
        with pytest.raises(StoreNotReady, match=said):
            await on_a_loop.open()
        await on_a_loop.close()

    async def test_newer_in_atomic_mode(self, postgres_url: str, bring: Any) -> None:
        """It is noticed before a handler runs in a process that has no other mode, and did not open its store."""
        bring(("9002_post_harmless", "ALTER TABLE semel_keys SET (fillfactor = 41)"))
        migrate(postgres_url, post=True)
        said = r"too old \(9002_post_harmless\)\. Run: pip install --upgrade semel"
        with closing(PostgresStore(postgres_url)) as store:
            for _ in range(2):
                lent = store.transaction()
                with pytest.raises(StoreNotReady, match=said):
                    lent.perform(Begin(claim("k")))
                lent.perform(Undo())
        on_a_loop = stores.async_store(postgres_url)
        lent_there = on_a_loop.transaction()
        with pytest.raises(StoreNotReady, match=said):
            await lent_there.perform(Begin(claim("k")))
        await lent_there.perform(Undo())
        await on_a_loop.close()

    def test_it_is_asked_once(self, postgres_url: str, server: psycopg.Connection[Any]) -> None:
        """Requests in atomic mode after the first do not ask of which version the tables are: they would get them even
        if no version were written down any more.
        """
        with closing(PostgresStore(postgres_url)) as store:
            for key in ("first", "second"):
                lent = store.transaction()
                assert isinstance(lent.perform(Begin(claim(key))), Hold)
                lent.perform(Undo())
                server.execute("INSERT INTO semel_keys_migrations VALUES ('9002_post_after') ON CONFLICT DO NOTHING")


class TestUnderLoad:
    async def test_next_version(self, postgres_url: str, bring: Any) -> None:
        """Requests of this version go on while the tables become those of the next one, and after: none fails, and
        none is run twice.
        """
        bring(NEXT)
        assert await served_while(postgres_url, lambda: migrate(postgres_url)) == [NEXT[0]]

    @pytest.mark.slow  # As the one above, from a version to the next.
    async def test_this_version(self, empty_postgres_url: str, bring: Any) -> None:
        """So do requests of this version on the tables of the one before, while they become its own; or the store is
        refused in one line with what to run.
        """
        bring(without=1)
        migrate(empty_postgres_url)
        try:
            with PostgresStore(empty_postgres_url) as store:
                store.perform(claim("k"))
        except StoreNotReady as refused:
            assert "Run: semel migrate" in str(refused)  # noqa: PT017 - either of the two
            return
        bring()
        assert await served_while(empty_postgres_url, lambda: migrate(empty_postgres_url)) == KNOWN[-1:]


async def served_while(url: str, act: Callable[[], Any], body: str = "done") -> Any:
    """Have workers send requests, each of them twice, to a guarded app on a loop and to an atomic one in threads, which
    answer with *body*: before, during and after *act*. Return what it does.
    """
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE TABLE effects (key text)")
        effect = "INSERT INTO effects VALUES (%s)"

        async def on_loop(request: Any) -> PlainTextResponse:
            runs.append(request.headers["idempotency-key"])
            return PlainTextResponse(body, 201)

        def in_thread(environ: Any, start_response: Any) -> list[bytes]:
            operation = semel.current()
            operation.connection.execute(effect, [operation.key])
            start_response("201 Created", [("content-type", "text/plain")])
            return [body.encode()]

        runs: list[str] = []
        numbers, is_over = count(), threading.Event()
        routes = [Route("/pay", on_loop, methods=["POST"])]
        loop_store, thread_store = stores.async_store(url), stores.store(url)
        asgi = semel.asgi.IdempotencyMiddleware(Starlette(routes=routes), store=loop_store, scope=semel.SINGLE_TENANT)
        atomic = Policy.ietf(mode="atomic")
        wsgi = semel.wsgi.IdempotencyMiddleware(in_thread, store=thread_store, scope=semel.SINGLE_TENANT, policy=atomic)

        async def worker(send: Callable[[Request], Awaitable[Response]], sent: list[str]) -> None:
            left = EACH
            while left:
                left -= is_over.is_set()
                key = f"key-{next(numbers)}"
                request = Request(lines=(("Idempotency-Key", key.encode()),))
                for is_replay in (False, True):
                    answer = await send(request)
                    assert (answer.status, answer.is_replay, answer.error) == (201, is_replay, None), answer
                    assert answer.body == body.encode()
                sent.append(key)

        def is_warm(sent: list[str]) -> bool:
            return len(sent) >= EACH or any(task.done() for task in tasks)

        guarded, atomically = list[str](), list[str]()
        workers = [worker(partial(call_asgi, asgi), guarded) for _ in range(4)]
        workers += [worker(lambda request: asyncio.to_thread(call_wsgi, wsgi, request), atomically) for _ in range(4)]
        tasks = [asyncio.ensure_future(each) for each in workers]
        try:
            await asyncio.to_thread(until, "requests are served", lambda: all(map(is_warm, (guarded, atomically))))
            done = await asyncio.to_thread(act)
        finally:
            is_over.set()
            await asyncio.gather(*tasks)
            await loop_store.close()
            thread_store.close()
        assert sorted(runs) == sorted(guarded)
        assert sorted(key for (key,) in connection.execute("SELECT key FROM effects")) == sorted(atomically)
        return done


class _Killed(BaseException):
    """What is left of a process that is killed: nothing of it runs."""


class _Mortal(_MigratingSession):
    """A session that ends after a number of calls, with all that it has done and not committed."""

    def __init__(self, address: Address, calls: int) -> None:
        super().__init__(address)
        self._left = calls

    def run(self, sql: str) -> list[Any]:
        if not self._left:
            self._link.close()
            raise _Killed
        self._left -= 1
        return super().run(sql)


def _book(server: psycopg.Connection[Any]) -> Book:
    return Book.of(name for (name,) in server.execute("SELECT name FROM semel_keys_migrations"))


def _valid(server: psycopg.Connection[Any], index: str = "semel_keys_colour") -> list[bool]:
    rows = server.execute("SELECT indisvalid FROM pg_index WHERE indexrelid = to_regclass(%s)", [index])
    return [valid for (valid,) in rows]
