"""The store's own connections are made as those of the engine or the pool that it was given: with its certificates, in
its schema, or not at all.
"""

from __future__ import annotations

import asyncio
import json
import os
import queue
import shutil
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import flask
import psycopg
import psycopg_pool
import pytest
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy import create_engine, event, text
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, sessionmaker

from semel.core.commands import Begin, Claim, Complete, Finish, Look, Release, Renew, Verdict
from semel.core.hint import hint_of
from semel.core.message import Answer
from semel.core.record import Hold, Record
from semel.core.state import Event
from semel.errors import ConfigurationError, StoreUnavailable
from semel.stores import async_store, store
from semel.stores.base import Store
from semel.stores.tiered import Tiered
from tests.kit import servers
from tests.stores.connections.lending import rows, until

ANSWER = Answer(201, (), b"{}")
SECONDS = 30  # only what is broken is waited for that long


def claim(key: str) -> Claim:
    return Claim("alice", key, os.urandom(16), b"fingerprint", timedelta(seconds=60), timedelta(hours=1))


@dataclass
class How:
    """How the application connects, in the words of both drivers."""

    url: str
    libpq: dict[str, Any] = field(default_factory=dict)
    asyncpg: dict[str, Any] = field(default_factory=dict)

    def engine_url(self, driver: str) -> str:
        return f"postgresql+{driver}" + self.url[self.url.index(":") :]


class Shop:
    """An application that has given what it has as the store, in either colour."""

    def __init__(self, given: Any, *, is_async: bool) -> None:
        self.store: Any = async_store(given) if is_async else store(given)

    async def perform(self, command: Any) -> Any:
        return await self._done(self.store.perform, command)

    async def close(self) -> None:
        await self._done(self.store.close)

    async def atomic(self, key: str) -> None:
        """Do what atomic mode does."""
        transaction, mine = self.store.transaction(), claim(key)
        hold = await self._done(transaction.perform, Begin(mine))
        assert await self._done(transaction.perform, Finish(mine, hold, None, Event.COMPLETE, ANSWER)) is Verdict.DONE

    async def _done(self, call: Callable[..., Any], *arguments: Any) -> Any:
        if isinstance(self.store, Store):
            return await asyncio.to_thread(call, *arguments)
        return await call(*arguments)


Kind = Callable[[How], AbstractAsyncContextManager[Shop]]


def sync(make: Callable[[How], Any], end: Callable[[Any], None]) -> Kind:
    @asynccontextmanager
    async def opened(how: How) -> AsyncIterator[Shop]:
        given = make(how)
        shop = Shop(given, is_async=False)
        yield shop
        await shop.close()
        await asyncio.to_thread(end, given)

    return opened


def sessions(how: How) -> Any:
    return sessionmaker(create_engine(how.engine_url("psycopg"), connect_args=how.libpq))


def by_creator(how: How) -> Any:
    return create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(how.url, **how.libpq))


def by_event(how: How) -> Any:
    """As those do who fetch a password for each connection."""
    engine = create_engine(how.engine_url("psycopg"))
    event.listen(engine, "do_connect", lambda _dialect, _record, _arguments, named: named.update(how.libpq))
    return engine


def pool(how: How) -> Any:
    return psycopg_pool.ConnectionPool(how.url, kwargs=how.libpq, min_size=0, max_size=2, open=True)


def pool_by_callable(how: How) -> Any:
    return psycopg_pool.ConnectionPool(lambda: how.url, kwargs=lambda: how.libpq, min_size=0, max_size=2, open=True)


@asynccontextmanager
async def flask_sqlalchemy(how: How) -> AsyncIterator[Shop]:
    app = flask.Flask("shop")
    app.config["SQLALCHEMY_DATABASE_URI"] = how.engine_url("psycopg")
    app.config["SQLALCHEMY_ENGINE_OPTIONS"] = {"connect_args": how.libpq}
    db = SQLAlchemy(app, model_class=type("Base", (DeclarativeBase,), {}))
    with app.app_context():
        shop = Shop(db, is_async=False)
        engine = db.engine
        yield shop
        await shop.close()
        await asyncio.to_thread(engine.dispose)


@asynccontextmanager
async def asyncpg_pool(how: How) -> AsyncIterator[Shop]:
    async with asyncpg.create_pool(how.url, min_size=0, max_size=2, **how.asyncpg) as given:
        shop = Shop(given, is_async=True)
        yield shop
        await shop.close()


def async_engine(driver: str, *, session: bool = False) -> Kind:
    @asynccontextmanager
    async def opened(how: How) -> AsyncIterator[Shop]:
        arguments = how.asyncpg if driver == "asyncpg" else how.libpq
        engine = create_async_engine(how.engine_url(driver), connect_args=arguments)
        shop = Shop(async_sessionmaker(engine) if session else engine, is_async=True)
        yield shop
        await shop.close()
        await engine.dispose()

    return opened


@asynccontextmanager
async def async_pool(how: How) -> AsyncIterator[Shop]:
    given = psycopg_pool.AsyncConnectionPool(how.url, kwargs=how.libpq, min_size=0, max_size=2, open=False)
    async with given:
        shop = Shop(given, is_async=True)
        yield shop
        await shop.close()


KINDS: dict[str, Kind] = {
    "engine": sync(
        lambda how: create_engine(how.engine_url("psycopg"), connect_args=how.libpq), lambda it: it.dispose()
    ),
    "engine with a creator": sync(by_creator, lambda it: it.dispose()),
    "engine with an event": sync(by_event, lambda it: it.dispose()),
    "sessionmaker": sync(sessions, lambda it: it.kw["bind"].dispose()),
    "flask-sqlalchemy": flask_sqlalchemy,
    "psycopg pool": sync(pool, lambda it: it.close()),
    "psycopg pool with callables": sync(pool_by_callable, lambda it: it.close()),
    "psycopg async pool": async_pool,
    "asyncpg pool": asyncpg_pool,
    "async engine asyncpg": async_engine("asyncpg"),
    "async sessionmaker asyncpg": async_engine("asyncpg", session=True),
    "async engine psycopg": async_engine("psycopg"),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


@dataclass(frozen=True)
class Certificates:
    """Of an authority, of a server that is 127.0.0.1, and of a client that is called *strict*."""

    folder: Path

    @property
    def libpq(self) -> dict[str, str]:
        files = {"sslrootcert": "ca.crt", "sslcert": "strict.crt", "sslkey": "strict.key"}
        return {"sslmode": "verify-full"} | {name: str(self.folder / file) for name, file in files.items()}

    @property
    def context(self) -> ssl.SSLContext:
        made = ssl.create_default_context(cafile=str(self.folder / "ca.crt"))
        made.load_cert_chain(self.folder / "strict.crt", self.folder / "strict.key")
        return made


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    program = shutil.which("openssl")
    if program is None:
        pytest.skip("The openssl program is not installed: TLS to PostgreSQL was not tested.")
    folder = tmp_path_factory.mktemp("certificates")
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "3650"]
    signed = ["-CA", "ca.crt", "-CAkey", "ca.key"]
    for name, subject, *more in (
        ("ca", "/CN=authority"),
        ("server", "/CN=127.0.0.1", *signed, "-addext", "subjectAltName=IP:127.0.0.1"),
        ("strict", "/CN=strict", *signed),
    ):
        made = [program, "req", "-x509", *key, "-subj", subject, "-keyout", f"{name}.key", "-out", f"{name}.crt", *more]
        subprocess.run(made, cwd=folder, check=True, capture_output=True)
        (folder / f"{name}.key").chmod(0o600)
    return Certificates(folder)


#: A role that can come in with its certificate only.
HBA = """
host all semel 127.0.0.1/32 trust
hostssl all strict 127.0.0.1/32 cert
"""


@pytest.fixture(scope="module")
def tls_server(certificates: Certificates) -> Iterator[str]:
    """A server that speaks TLS; the URL of its superuser."""
    with servers.postgres(settings={"fsync": "off"}) as server:
        with psycopg.connect(server.url, autocommit=True) as connection:
            files = {name: (certificates.folder / name).read_text() for name in ("ca.crt", "server.crt", "server.key")}
            for name, content in {**files, "pg_hba.conf": HBA}.items():
                # As the server's own user, whoever that is: only that one may read a key.
                target = f"COPY (SELECT unnest(string_to_array($${content}$$, E'\\n'))) TO PROGRAM "
                connection.execute(f"{target} 'cat > {name} && chmod 600 {name}'".encode())
            for setting in ("ssl = on", "ssl_ca_file = 'ca.crt'"):
                connection.execute(f"ALTER SYSTEM SET {setting}".encode())
            connection.execute("CREATE ROLE strict LOGIN")
            connection.execute("GRANT ALL ON SCHEMA public TO strict")
            connection.execute("SELECT pg_reload_conf()")
        yield server.url


@pytest.fixture
async def tls(tls_server: str, certificates: Certificates) -> AsyncIterator[How]:
    """How the application connects: as *strict*, and with its certificate."""
    await until(tls_server, "SELECT current_setting('ssl')::boolean")
    how = How(tls_server.replace("semel@", "strict@"), certificates.libpq, {"ssl": certificates.context})
    by_url = store(psycopg_url(how))
    await asyncio.to_thread(by_url.migrate)
    await asyncio.to_thread(by_url.close)
    await until(tls_server, "SELECT count(*) = 0 FROM pg_stat_activity WHERE usename = 'strict'")
    yield how
    with psycopg.connect(tls_server, autocommit=True) as connection:
        connection.execute("TRUNCATE semel_keys")


def psycopg_url(how: How) -> str:
    return f"{how.url}?" + "&".join(f"{name}={value}" for name, value in how.libpq.items())


SESSIONS = """
SELECT concat_ws(' ', ssl, client_dn, application_name)
  FROM pg_stat_activity JOIN pg_stat_ssl USING (pid) WHERE usename = 'strict'
"""


async def everything(shop: Shop, url: str) -> None:
    """Have every kind of connection that a store opens: claims, answers, others, hints, and transactions."""
    heard: queue.SimpleQueue[str] = queue.SimpleQueue()
    shop.store.listen(heard.put)
    await until(url, "SELECT count(*) > 0 FROM pg_stat_activity WHERE query ILIKE 'listen %' AND state = 'idle'")
    hold = await shop.perform(claim("k"))
    assert isinstance(hold, Hold)
    assert await shop.perform(Complete(hold, Event.COMPLETE, ANSWER, wakes=True)) is Verdict.DONE
    assert isinstance(await shop.perform(Look("alice", "k")), Record)
    async with asyncio.timeout(SECONDS):
        while heard.empty():  # noqa: ASYNC110 - a thread of the store's fills it
            await asyncio.sleep(0.01)
    assert heard.get() == hint_of("alice", "k")
    if not flask.has_app_context():  # there, a transaction is the session's, and belongs to its thread
        await shop.atomic("atomic")


class TestTLS:
    @every_kind
    async def test_every_session_has_the_certificate(self, kind: str, tls: How, tls_server: str) -> None:
        """Every session of the store's own is encrypted, and shows the certificate that the engine or the pool has."""
        async with KINDS[kind](tls) as shop:
            await everything(shop, tls_server)
            seen = await rows(tls_server, SESSIONS)
        own = [each for each in seen if each.endswith("semel")]
        assert len(own) >= 4  # claims, answers, look-ups, hints
        assert {each.split()[:2] == ["t", "/CN=strict"] for each in seen} == {True}

    @every_kind
    async def test_no_plain_text(self, kind: str, postgres_url: str) -> None:
        """Where the engine or the pool insists on TLS and the server has none, nothing is sent in plain text."""
        await asyncio.to_thread(store(postgres_url).migrate)
        async with KINDS[kind](How(postgres_url, {"sslmode": "require"}, {"ssl": "require"})) as shop:
            with pytest.raises(StoreUnavailable):
                await shop.perform(claim("k"))
        assert await rows(postgres_url, "SELECT key FROM semel_keys") == []

    @every_kind
    async def test_wrong_authority(self, kind: str, tls: How, certificates: Certificates) -> None:
        """A server that the engine or the pool would not trust is not trusted with claims either."""
        stranger = str(certificates.folder / "strict.crt")
        untrusting = ssl.create_default_context(cafile=stranger)
        untrusting.load_cert_chain(certificates.folder / "strict.crt", certificates.folder / "strict.key")
        async with KINDS[kind](How(tls.url, tls.libpq | {"sslrootcert": stranger}, {"ssl": untrusting})) as shop:
            with pytest.raises(StoreUnavailable, match=r"can't be reached.*certificate verif"):
                await shop.perform(claim("k"))

    @pytest.mark.parametrize("make", [store, async_store])
    async def test_wrong_authority_in_a_url(self, make: Any, tls: How, certificates: Certificates) -> None:
        """A URL that names another authority reaches no server, and says why."""
        stranger = tls.libpq | {"sslrootcert": str(certificates.folder / "strict.crt")}
        shop = Shop.__new__(Shop)
        shop.store = make(psycopg_url(How(tls.url, stranger)))
        with pytest.raises(StoreUnavailable, match=r"can't be reached.*certificate verif"):
            await shop.perform(claim("k"))

    @pytest.mark.parametrize("make", [store, async_store])
    async def test_url(self, make: Any, tls: How, tls_server: str) -> None:
        """A URL says the same to both drivers: sslmode, sslrootcert, sslcert and sslkey."""
        made = make(psycopg_url(tls))
        shop = Shop.__new__(Shop)
        shop.store = made
        await everything(shop, tls_server)
        seen = await rows(tls_server, SESSIONS)
        await shop.close()
        assert len(seen) >= 5
        assert {each.split()[:2] == ["t", "/CN=strict"] for each in seen} == {True}


DJANGO = """
import json, os, sys
import django
from datetime import timedelta
from django.conf import settings
settings.configure(
    DATABASES={"default": {"ENGINE": "django.db.backends.postgresql", **json.loads(sys.argv[1])}},
    INSTALLED_APPS=["semel.django"],
)
django.setup()
from django.db import connection
from semel.core.commands import Claim
from semel.stores.django.store import DjangoStore
keys = DjangoStore()
keys.migrate()
keys.open()
hold = keys.perform(Claim("alice", "k", os.urandom(16), b"f", timedelta(seconds=60), timedelta(hours=1)))
with connection.cursor() as cursor:
    cursor.execute(sys.argv[2])
    print(json.dumps([row[0] for row in cursor.fetchall()]))
"""


def django(how: How, **options: str) -> tuple[list[str], str]:
    """Use Django's own store in a new process; return its sessions, and what it has logged."""
    parts = urlsplit(how.url)
    where = {"NAME": parts.path.lstrip("/"), "USER": parts.username, "HOST": parts.hostname, "PORT": parts.port}
    settings = json.dumps(where | {"OPTIONS": how.libpq | options})
    done = subprocess.run(
        [sys.executable, "-c", DJANGO, settings, SESSIONS], capture_output=True, text=True, check=False, timeout=SECONDS
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


class TestDjango:
    def test_tls(self, tls_server: str, certificates: Certificates) -> None:
        """Django's own store has no session but Django's, so what OPTIONS says of TLS counts for all of them."""
        with psycopg.connect(tls_server, autocommit=True) as connection:
            connection.execute("DROP DATABASE IF EXISTS django")
            connection.execute("CREATE DATABASE django OWNER strict")
        how = How(tls_server.replace("semel@", "strict@").replace("/postgres", "/django"), certificates.libpq)
        seen, logged = django(how)
        assert [each.split()[:2] for each in seen] == [["t", "/CN=strict"]]
        assert "synchronous_commit" not in logged

    def test_synchronous_commit(self, postgres_url: str) -> None:
        """Django's sessions are the application's: where their COMMIT does not wait for the disk, it is warned once."""
        _, logged = django(How(postgres_url), options="-c synchronous_commit=off")
        assert logged.count("synchronous_commit = off") == 1


class TestSchema:
    @pytest.fixture
    async def how(self, postgres_url: str) -> How:
        """Tables in a schema that only the engine or the pool knows of."""
        options = {"options": "-c search_path=shop"}
        with psycopg.connect(postgres_url, autocommit=True) as connection:
            connection.execute("CREATE SCHEMA shop")
        made = store(f"{postgres_url}?options=-csearch_path%3Dshop")
        await asyncio.to_thread(made.migrate)
        await asyncio.to_thread(made.close)
        return How(postgres_url, options, {"server_settings": {"search_path": "shop"}})

    @every_kind
    async def test_search_path(self, kind: str, how: How) -> None:
        """Claims and handlers' transactions meet in the schema that the engine or the pool searches."""
        async with KINDS[kind](how) as shop:
            assert isinstance(await shop.perform(claim("k")), Hold)
            if kind != "flask-sqlalchemy":
                await shop.atomic("atomic")
        assert sorted(await rows(how.url, "SELECT key FROM shop.semel_keys")) in (["atomic", "k"], ["k"])

    async def test_set_as_it_is_made(self, how: How) -> None:
        """What the application sets on each new connection is set on the store's own too."""

        def on_connect(connection: Any, _record: object) -> None:
            connection.cursor().execute("SET search_path = shop")

        engine = create_engine(how.engine_url("psycopg"))
        event.listen(engine, "connect", on_connect)
        async_engine = create_async_engine(how.engine_url("asyncpg"))
        event.listen(async_engine.sync_engine, "connect", on_connect)

        def configure(connection: psycopg.Connection[Any]) -> None:
            connection.execute("SET search_path = shop")
            connection.commit()

        async def init(connection: Any) -> None:
            await connection.execute("SET search_path = shop")

        with psycopg_pool.ConnectionPool(how.url, configure=configure, min_size=0, max_size=1, open=True) as sync_pool:
            async with asyncpg.create_pool(how.url, init=init, min_size=0, max_size=1) as loops_pool:
                for number, given in enumerate([engine, sync_pool, async_engine, loops_pool]):
                    shop = Shop(given, is_async=number > 1)
                    assert isinstance(await shop.perform(claim(str(number))), Hold)
                    await shop.close()
        await async_engine.dispose()
        engine.dispose()
        assert sorted(await rows(how.url, "SELECT key FROM shop.semel_keys")) == ["0", "1", "2", "3"]


class TestOwnConnections:
    @every_kind
    async def test_full_pool(self, kind: str, postgres_url: str) -> None:
        """The store's own connections take no place in the pool: an answer is stored while handlers have all of it."""
        await asyncio.to_thread(store(postgres_url).migrate)
        async with KINDS[kind](How(postgres_url)) as shop:
            held = [shop.store.transaction() for _ in range(2)] if kind != "flask-sqlalchemy" else []
            for number, transaction in enumerate(held):
                assert isinstance(await shop._done(transaction.perform, Begin(claim(f"held {number}"))), Hold)
            hold = await shop.perform(claim("k"))
            assert await shop.perform(Release(hold)) is Verdict.DONE
            for number, transaction in enumerate(held):
                mine = claim(f"held {number}")
                hold = Hold(mine.scope, mine.key, 1, mine.token)
                await shop._done(transaction.perform, Finish(mine, hold, None, Event.COMPLETE, ANSWER))

    async def test_password_that_is_asked_for(self, postgres_url: str) -> None:
        """A pool that asks for its password with each connection is asked with the store's own, too."""
        await asyncio.to_thread(store(postgres_url).migrate)
        asked: list[int] = []

        def password() -> str:
            asked.append(1)
            return "secret"

        async with asyncpg.create_pool(postgres_url, password=password, min_size=0) as given:
            shop = Shop(given, is_async=True)
            assert isinstance(await shop.perform(claim("k")), Hold)
            await shop.close()
        assert asked

    async def test_connections_that_one_loop_alone_can_make(
        self, postgres_url: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Where the application can connect only on its own event loop, as with a token that a session of that loop
        fetches, leases are renewed there, and a warning says what that costs.
        """
        await asyncio.to_thread(store(postgres_url).migrate)
        home = asyncio.get_running_loop()

        async def password() -> str:
            token: asyncio.Future[str] = home.create_future()
            home.call_soon_threadsafe(home.call_later, 0.01, token.set_result, "secret")
            return await token

        async with asyncpg.create_pool(postgres_url, password=password, min_size=0) as given:
            opened = async_store(given)
            hold = await opened.perform(claim("k"))
            assert isinstance(hold, Hold)
            renew = Renew(((hold, timedelta(hours=2)),))
            for _ in range(2):
                assert await asyncio.to_thread(opened.renew, renew) == frozenset()
            record = await opened.perform(Look("alice", "k"))
            assert record is not None
            assert record.lease_left is not None
            assert record.lease_left > timedelta(hours=1)
            await opened.close()
        [said] = [each for each in caplog.messages if "event loop" in each]
        assert "may lose theirs" in said

    async def test_engine_is_left_alone(self, postgres_url: str) -> None:
        """What the store opens is closed with the store, and the engine's pool never knew of it."""
        await asyncio.to_thread(store(postgres_url).migrate)
        engine = create_async_engine("postgresql+asyncpg" + postgres_url[postgres_url.index(":") :])
        shop = Shop(engine, is_async=True)
        await shop.perform(claim("k"))
        assert engine.pool.checkedin() == engine.pool.checkedout() == 0  # type: ignore[attr-defined]  # a queue's
        await shop.close()
        await until(postgres_url, "SELECT count(*) = 1 FROM pg_stat_activity WHERE datname = current_database()")
        async with engine.connect() as connection:
            assert (await connection.execute(text("SELECT 1"))).scalar() == 1
        await engine.dispose()

    def test_cache_needs_a_name(self, postgres_url: str) -> None:
        """An engine does not say all of where it leads, so answers that a Redis is shared for need a namespace."""
        engine = create_engine("postgresql+psycopg" + postgres_url[postgres_url.index(":") :])
        with pytest.raises(ConfigurationError, match="namespace"):
            store(Tiered(engine, "redis://127.0.0.1:1/0"))
        store(Tiered(engine, "redis://127.0.0.1:1/0", namespace="shop")).close()
        store(Tiered(engine)).close()
        engine.dispose()
