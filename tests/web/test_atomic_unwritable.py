"""Where the database can't be written, the handler is not run: a standby, a server that was made read-only, a role that
lacks a privilege, a file that can only be read.
"""

import asyncio
import logging
import sqlite3
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import psycopg
import psycopg_pool
import pytest
from sqlalchemy import create_engine, event
from sqlalchemy.ext.asyncio import create_async_engine

from semel import stores
from semel.errors import StoreNotPermitted, StoreNotReady
from tests.kit import servers
from tests.web.harness import HANG_SECONDS, Response
from tests.web.lenders import POSTGRES, Api, api
from tests.web.test_atomic_races import is_the_answer, make_tables

TRIES = 3


def run(url: str, *statements: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement.encode())


def until(url: str, sql: str) -> None:
    """Wait until *sql* says true."""

    async def wait() -> None:
        async with asyncio.timeout(HANG_SECONDS):
            while True:
                with psycopg.connect(url, autocommit=True) as connection:
                    if connection.execute(sql.encode()).fetchall()[0][0]:
                        return
                await asyncio.sleep(0.01)

    asyncio.run(wait())


def refusals(endpoint: Api, key: str) -> list[Response]:
    """Retry a few times; return the answers that are not the 503 of a store that can't serve."""
    answers = [endpoint.send(key) for _ in range(TRIES)]
    return [each for each in answers if each.status != 503 or each.code != "store-unavailable"]


@pytest.mark.parametrize("kind", POSTGRES)
def test_a_database_that_is_made_read_only(kind: str, postgres_url: str, caplog: pytest.LogCaptureFixture) -> None:
    """Where a database is made read-only while it is used, requests get 503 and no handler runs; what is finished is
    answered from its record; and the setting, made on purpose, is not overridden.
    """
    caplog.set_level(logging.CRITICAL)
    database = urlsplit(make_tables(postgres_url)).path[1:]
    with api(kind, postgres_url) as endpoint:
        assert endpoint.send("key-1").status == 201
        run(
            postgres_url,
            f"ALTER DATABASE {database} SET default_transaction_read_only = on",
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()",
        )
        assert refusals(endpoint, "key-2") == []
        assert endpoint.runs == 1
        assert is_the_answer(endpoint.send("key-1"))


@pytest.fixture(scope="module")
def alone() -> Iterator[servers.PostgresServer]:
    """A server with all tables, that a test may change as a whole."""
    with servers.postgres(settings={"fsync": "off"}) as server:
        make_tables(server.url)
        yield server


@pytest.mark.parametrize("mode", ["atomic", "guard"])
@pytest.mark.parametrize("kind", ["psycopg", "engine psycopg", "asyncpg", "async engine asyncpg"])
def test_a_server_that_is_turned_read_only(kind: str, mode: str, alone: servers.PostgresServer) -> None:
    """So it is where a whole server is turned read-only under the sessions that are open, and back."""
    with api(kind, alone.url, **({} if mode == "atomic" else {"mode": "guard"})) as endpoint:
        endpoint.is_lent = mode == "atomic"
        first, second = (f"{mode}-{kind.replace(' ', '-')}-{number}" for number in (1, 2))
        assert endpoint.send(first).status == 201
        try:
            run(alone.url, "ALTER SYSTEM SET default_transaction_read_only = on", "SELECT pg_reload_conf()")
            until(alone.url, "SELECT current_setting('default_transaction_read_only')::bool")
            assert refusals(endpoint, second) == []
            assert endpoint.runs == 1
        finally:
            run(
                alone.url,
                "SET default_transaction_read_only = off",
                "ALTER SYSTEM RESET default_transaction_read_only",
                "SELECT pg_reload_conf()",
            )
            until(alone.url, "SELECT NOT current_setting('default_transaction_read_only')::bool")
        # The session of the last refusal may be on its way out, with the lock of the key.
        while (answer := endpoint.send(second)).code == "idempotency-key-in-progress":
            pass
        assert answer.status == 201


@pytest.fixture(scope="module")
def standby(alone: servers.PostgresServer) -> Iterator[servers.PostgresServer]:
    """A hot standby of it."""
    with servers.postgres_standby(alone) as server:
        until(server.url, "SELECT pg_is_in_recovery() AND to_regclass('payments') IS NOT NULL")
        yield server


@pytest.mark.parametrize("kind", POSTGRES)
def test_a_hot_standby(kind: str, standby: servers.PostgresServer) -> None:
    """On a hot standby no handler runs."""
    with api(kind, standby.url) as endpoint:
        assert refusals(endpoint, "key-1") == []
        assert endpoint.runs == 0


@pytest.mark.parametrize("mode", ["atomic", "guard"])
@pytest.mark.parametrize("kind", ["psycopg", "asyncpg"])
def test_a_standby_that_is_behind(
    kind: str, mode: str, alone: servers.PostgresServer, standby: servers.PostgresServer
) -> None:
    """A standby answers no replay: what it has of a finished operation may be older than what the primary has."""
    policy: dict[str, Any] = {} if mode == "atomic" else {"mode": "guard"}
    key = f"behind-{mode}-{kind}"
    with api(kind, alone.url, **policy) as endpoint:
        endpoint.is_lent = mode == "atomic"
        assert endpoint.send(key).status == 201
    until(standby.url, f"SELECT EXISTS (SELECT FROM semel_keys WHERE key = '{key}' AND state = 'complete')")
    with api(kind, standby.url, **policy) as endpoint:
        endpoint.is_lent = mode == "atomic"
        assert refusals(endpoint, key) == []
        assert endpoint.runs == 0


@pytest.mark.parametrize("mode", ["atomic", "guard"])
@pytest.mark.parametrize("kind", ["psycopg", "asyncpg"])
def test_an_address_of_several_servers(
    kind: str, mode: str, alone: servers.PostgresServer, standby: servers.PostgresServer
) -> None:
    """An address may name several servers: with target_session_attrs the primary is found, whichever it is; and where
    none is, no handler runs.
    """
    policy: dict[str, Any] = {} if mode == "atomic" else {"mode": "guard"}
    here, there = (urlsplit(each.url).netloc.rpartition("@")[2] for each in (standby, alone))
    for hosts, status in ((f"{here},{there}", 201), (f"{here},{here}", 503)):
        url = urlsplit(alone.url)._replace(netloc=f"semel@{hosts}", query="target_session_attrs=read-write").geturl()
        with api(kind, url, **policy) as endpoint:
            endpoint.is_lent = mode == "atomic"
            answer = endpoint.send(f"several-{mode}-{kind}-{status}")
            assert (answer.status, endpoint.runs) == (status, 1 if status == 201 else 0)
            assert status == 201 or answer.code == "store-unavailable"


@pytest.fixture
def clerk(postgres_url: str) -> Iterator[str]:
    """The URL of a role that may do all that is needed."""
    make_tables(postgres_url)
    run(
        postgres_url,
        "DROP ROLE IF EXISTS clerk",
        "CREATE ROLE clerk LOGIN",
        "GRANT SELECT, INSERT, UPDATE, DELETE ON semel_keys, payments TO clerk",
        "GRANT INSERT ON semel_audit TO clerk",
    )
    parts = urlsplit(postgres_url)
    yield parts._replace(netloc=f"clerk@{parts.hostname}:{parts.port}").geturl()
    run(postgres_url, "DROP OWNED BY clerk", "DROP ROLE clerk")


@pytest.mark.parametrize("kind", POSTGRES)
def test_tables_of_an_older_version(kind: str, postgres_url: str) -> None:
    """Where a column is missing that a record has at its end, the handler does not run; nor does a store open."""
    make_tables(postgres_url)
    run(postgres_url, "ALTER TABLE semel_keys DROP COLUMN traceparent")
    with api(kind, postgres_url) as endpoint:
        assert refusals(endpoint, "key-1") == []
        assert endpoint.runs == 0
    with pytest.raises(StoreNotReady, match="semel migrate"):
        stores.store(postgres_url).open()


LACKS = [("INSERT", "semel_keys"), ("UPDATE", "semel_keys"), ("DELETE", "semel_keys"), ("INSERT", "semel_audit")]


@pytest.mark.parametrize("kind", POSTGRES)
def test_a_role_without_a_privilege(kind: str, clerk: str, postgres_url: str) -> None:
    """A role that lacks a privilege on a table of Semel's is found out before a handler runs, in the midst of things
    too; one that has what is needed, and no more, is served.
    """
    with api(kind, clerk) as endpoint:
        assert endpoint.send("key-1").status == 201
        run(postgres_url, "REVOKE INSERT ON semel_audit FROM clerk")
        assert refusals(endpoint, "key-2") == []
        assert endpoint.runs == 1
        run(postgres_url, "GRANT INSERT ON semel_audit TO clerk")
        assert endpoint.send("key-2").status == 201


@pytest.mark.parametrize("privilege, table", LACKS)
async def test_opening_says_which_grant_to_type(privilege: str, table: str, clerk: str, postgres_url: str) -> None:
    """A store that opens, or that is first used, says which privilege is missing, and the command that grants it."""
    run(postgres_url, f"REVOKE {privilege} ON {table} FROM clerk")
    grant = f'GRANT {privilege} ON {table} TO "clerk"'
    with pytest.raises(StoreNotPermitted, match=grant):
        stores.store(clerk).open()
    store = stores.async_store(clerk)
    with pytest.raises(StoreNotPermitted, match=grant):
        await store.open()
    await store.close()


@pytest.mark.parametrize("privilege, table", LACKS)
@pytest.mark.parametrize("kind", ["psycopg", "asyncpg"])
def test_in_guard_mode_too(kind: str, privilege: str, table: str, clerk: str, postgres_url: str) -> None:
    """With the guard alone, a role that may claim a key but not end it is found out with the first request."""
    run(postgres_url, f"REVOKE {privilege} ON {table} FROM clerk")
    with api(kind, clerk, mode="guard") as endpoint:
        endpoint.is_lent = False
        assert refusals(endpoint, "key-1") == []
        assert endpoint.runs == 0


def test_an_own_read_only_is_kept(postgres_url: str) -> None:
    """A pool whose connections are read-only on purpose stays so: no handler runs on it."""
    make_tables(postgres_url)

    def configure(connection: psycopg.Connection[Any]) -> None:
        connection.read_only = True

    pool = psycopg_pool.ConnectionPool(postgres_url, configure=configure, min_size=0, max_size=2, open=True)
    with api("psycopg", postgres_url, given=pool) as endpoint:
        assert refusals(endpoint, "key-1") == []
        assert endpoint.runs == 0


def test_a_file_that_can_only_be_read(sqlite_url: str) -> None:
    """On SQLite, an engine that opens the file to read only runs no handler."""
    make_tables(sqlite_url)
    path = urlsplit(sqlite_url).path.removeprefix("/")

    def connect() -> sqlite3.Connection:
        return sqlite3.connect(f"file:{path}?mode=ro", uri=True, check_same_thread=False)

    with api("sqlite", sqlite_url, given=create_engine(sqlite_url, creator=connect)) as endpoint:
        assert refusals(endpoint, "key-1") == []
        assert endpoint.runs == 0


@pytest.mark.parametrize("kind", ["sqlite", "async sqlite"])
def test_connections_that_only_read(kind: str, sqlite_url: str) -> None:
    """On SQLite, an engine whose connections were told to read only runs no handler."""
    make_tables(sqlite_url)
    given: Any
    if kind == "sqlite":
        given = engine = create_engine(sqlite_url)
    else:
        given = create_async_engine(sqlite_url.replace("sqlite", "sqlite+aiosqlite", 1))
        engine = given.sync_engine
    event.listen(engine, "connect", lambda connection, _: connection.execute("PRAGMA query_only = ON"))
    with api(kind, sqlite_url, given=given) as endpoint:
        assert refusals(endpoint, "key-1") == []
        assert endpoint.runs == 0
