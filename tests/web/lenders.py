"""One payment endpoint in atomic mode, behind every kind of connection that a handler can be lent, in its own colour.
What is true of all of them is said in the tests.
"""

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from wsgiref.types import StartResponse, WSGIEnvironment

import asyncpg
import psycopg
import psycopg_pool
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import sessionmaker
from starlette.applications import Starlette
from starlette.requests import Request as StarletteRequest
from starlette.responses import PlainTextResponse
from starlette.routing import Route

import semel
import semel.asgi
import semel.wsgi
from semel import Policy, stores
from tests.web.harness import HANG_SECONDS, Request, Response, call_asgi, call_wsgi

TABLE = "CREATE TABLE payments (note VARCHAR(50) NOT NULL)"
PAY = "INSERT INTO payments (note) VALUES ('paid')"

#: As many requests at once as a client that has lost its patience can send.
CROWD = 20


def _engine(scheme: str, url: str) -> Any:
    return create_engine(scheme + url[url.index(":") :], max_overflow=CROWD)


def _async_engine(scheme: str, url: str) -> Any:
    return create_async_engine(scheme + url[url.index(":") :], max_overflow=CROWD)


#: By name: what is given to the store, made of a URL. None: the store has its own connections.
SYNC: dict[str, Callable[[str], Any] | None] = {
    "psycopg": None,
    "psycopg pool": lambda url: psycopg_pool.ConnectionPool(url, min_size=0, max_size=5, open=True),
    "engine psycopg": lambda url: _engine("postgresql+psycopg", url),
    "session psycopg": lambda url: sessionmaker(_engine("postgresql+psycopg", url)),
}
ASYNC: dict[str, Callable[[str], Any] | None] = {
    "asyncpg": None,
    "asyncpg pool": lambda url: asyncpg.create_pool(url, min_size=0, max_size=5),
    "psycopg async pool": lambda url: psycopg_pool.AsyncConnectionPool(url, min_size=0, max_size=5, open=False),
    "async engine psycopg": lambda url: _async_engine("postgresql+psycopg", url),
    "async engine asyncpg": lambda url: _async_engine("postgresql+asyncpg", url),
    "async session asyncpg": lambda url: async_sessionmaker(_async_engine("postgresql+asyncpg", url)),
}
SYNC_SQLITE: dict[str, Callable[[str], Any] | None] = {
    "sqlite": None,
    "engine sqlite": lambda url: _engine("sqlite", url),
}
ASYNC_SQLITE: dict[str, Callable[[str], Any] | None] = {
    "async sqlite": None,
    "async engine sqlite": lambda url: _async_engine("sqlite+aiosqlite", url),
}
POSTGRES = (*SYNC, *ASYNC)
SQLITE = (*SYNC_SQLITE, *ASYNC_SQLITE)
#: Whose transactions have the isolation that the application, or its database, says.
GIVEN = tuple(name for name in POSTGRES if name not in {"psycopg", "asyncpg"})


class Api:
    """The endpoint. *then* is called in the handler after its INSERT."""

    def __init__(self, kind: str, url: str, given: Any = None, **policy: Any) -> None:
        self.runs = 0
        #: Whether the handler writes through a connection of Semel's; in guard mode it writes nothing.
        self.is_lent = True
        self.then: Callable[[], object] = lambda: None
        self.threads = ThreadPoolExecutor(2 * CROWD)
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.is_async = kind in ASYNC | ASYNC_SQLITE
        make = (SYNC | ASYNC | SYNC_SQLITE | ASYNC_SQLITE)[kind]
        settings: dict[str, Any] = {"scope": lambda _: "alice", "policy": Policy.ietf(**{"mode": "atomic", **policy})}
        if self.is_async:
            self.given = self._on_loop(self._opened(make, url)) if make else given
            app = Starlette(routes=[Route("/pay", self._serve_async, methods=["POST"])])
            settings["store"] = stores.async_store(self.given) if self.given is not None else url
            self.asgi = semel.asgi.IdempotencyMiddleware(app, **settings)
        else:
            self.given = make(url) if make else given
            settings["store"] = stores.store(self.given) if self.given is not None else url
            self.wsgi = semel.wsgi.IdempotencyMiddleware(self._serve, **settings)

    def start(self, key: str = "key-1", body: bytes = b"5") -> "Future[Response]":
        request = Request(lines=(("Idempotency-Key", key.encode()),), body=body)
        if self.is_async:
            return asyncio.run_coroutine_threadsafe(call_asgi(self.asgi, request), self.loop)
        return self.threads.submit(call_wsgi, self.wsgi, request)

    def send(self, key: str = "key-1", body: bytes = b"5") -> Response:
        return self.start(key, body).result(HANG_SECONDS)

    def send_all(self, *bodies: bytes, key: str = "key-1") -> list[Response]:
        """Send them at once."""
        started = [self.start(key, body) for body in bodies]
        return [each.result(HANG_SECONDS) for each in started]

    def close(self) -> None:
        if self.is_async:
            self._on_loop(self.asgi.store.close())
            self._on_loop(self._closed())
        else:
            self.wsgi.store.close()
            for name in ("dispose", "close"):
                end = getattr(getattr(self.given, "kw", {}).get("bind", self.given), name, None)
                if end is not None:
                    end()
                    break
        self.threads.shutdown()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()

    def _on_loop(self, running: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(running, self.loop).result(HANG_SECONDS)

    async def _opened(self, make: Callable[[str], Any], url: str) -> Any:
        given = make(url)
        if isinstance(given, psycopg_pool.AsyncConnectionPool):
            await given.open()
        elif isinstance(given, asyncpg.Pool):
            await given
        return given

    async def _closed(self) -> None:
        given = getattr(self.given, "kw", {}).get("bind", self.given)
        if hasattr(given, "dispose"):
            await given.dispose()
        elif given is not None:
            await given.close()

    def _write(self) -> Any:
        self.runs += 1
        if not self.is_lent:
            return None
        connection = semel.current().connection
        return connection.execute(text(PAY) if type(connection).__module__.startswith("sqlalchemy") else PAY)

    async def _serve_async(self, _request: StarletteRequest) -> PlainTextResponse:
        done = self._write()
        if hasattr(done, "__await__"):
            await done
        run = self.runs
        await asyncio.to_thread(self.then)
        return PlainTextResponse(f"paid {run}", 201)

    def _serve(self, _environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        self._write()
        run = self.runs
        self.then()
        start_response("201 Created", [("Content-Type", "text/plain")])
        return [f"paid {run}".encode()]


@contextmanager
def api(kind: str, url: str, given: Any = None, **policy: Any) -> Iterator[Api]:
    """An endpoint whose database has all tables already; *given* is used by a kind that would have its own."""
    made = Api(kind, url, given, **policy)
    try:
        yield made
    finally:
        made.close()


#: Stands before the server's own function: waits at the first gate before it tries a lock, and at the second once its
#: transaction has two, which are those of a request and of its key. A test closes a gate by taking its lock.
GATES = """
CREATE SCHEMA gates;
CREATE FUNCTION gates.pg_try_advisory_xact_lock(number bigint) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    is_mine boolean;
    had text;
BEGIN
    PERFORM pg_advisory_lock_shared(1), pg_advisory_unlock_shared(1);
    is_mine := pg_catalog.pg_try_advisory_xact_lock(number);
    had := coalesce(current_setting('gates.locks', true), '');
    IF is_mine AND had <> '' AND had <> number::text THEN
        PERFORM pg_advisory_lock_shared(2), pg_advisory_unlock_shared(2);
    ELSIF is_mine THEN
        PERFORM set_config('gates.locks', number::text, true);
    END IF;
    RETURN is_mine;
END $$;
GRANT USAGE ON SCHEMA gates TO PUBLIC;
"""

_WAITING = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = %s AND NOT granted"


class Gates:
    """Two places where every request of atomic mode on one PostgreSQL database can be held up."""

    BEFORE_THE_LOCK, WITH_THE_LOCK = 1, 2

    def __init__(self, url: str) -> None:
        self._connection = psycopg.connect(url, autocommit=True)
        self._connection.execute(GATES.encode(), prepare=False)
        name = self._connection.info.dbname
        self._connection.execute(f'ALTER DATABASE "{name}" SET search_path = gates, pg_catalog, public'.encode())

    @contextmanager
    def closed(self, gate: int) -> Iterator[Callable[[], None]]:
        """Close a gate while the block runs; what is lent waits until a request stands before it."""
        self._connection.execute("SELECT pg_advisory_lock(%s)", [gate])
        try:
            yield lambda: self._until_one_waits(gate)
        finally:
            self._connection.execute("SELECT pg_advisory_unlock(%s)", [gate])

    def close(self) -> None:
        self._connection.close()

    def _until_one_waits(self, gate: int) -> None:
        pause = threading.Event()
        for _ in range(HANG_SECONDS * 100):
            if self._connection.execute(_WAITING, [gate]).fetchall()[0][0]:
                return
            pause.wait(0.01)
        raise AssertionError("No request has come to the gate.")
