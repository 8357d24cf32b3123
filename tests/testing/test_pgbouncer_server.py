"""PgBouncer starts in front of a test server, hands connections around, and comes back. The stores on it are tested
elsewhere.
"""

import psycopg
import pytest

from tests.kit import servers


def pid(connection: psycopg.Connection) -> int:
    row = connection.execute("SELECT pg_backend_pid()").fetchone()
    assert row
    return int(row[0])


def connect(url: str) -> psycopg.Connection:
    return psycopg.connect(url, autocommit=True, prepare_threshold=None)


def test_a_connection_is_somebody_elses_after_each_transaction(pgbouncer_url: str) -> None:
    """In transaction mode two clients are served by one connection in turn, and by two while both are in one."""
    with connect(pgbouncer_url) as one, connect(pgbouncer_url) as other:
        assert pid(one) == pid(other)
        with one.transaction(), other.transaction():
            assert pid(one) != pid(other)


def test_the_size_of_the_pool_is_a_setting(pgbouncer_url: str, postgres_server: servers.PostgresServer) -> None:
    """With one connection, the second transaction waits for the end of the first."""
    settings = {"query_wait_timeout": "1"}
    with servers.pgbouncer(postgres_server, pool_size=1, settings=settings) as bouncer:
        url = bouncer.through(pgbouncer_url)
        with connect(url) as one, connect(url) as other, one.transaction():
            pid(one)
            with pytest.raises(psycopg.OperationalError, match="query_wait_timeout"):
                pid(other)


def test_the_same_database_is_behind_both_urls(pgbouncer_url: str, postgres_url: str) -> None:
    """What is written directly is read through PgBouncer."""
    with connect(postgres_url) as direct, connect(pgbouncer_url) as through:
        direct.execute("CREATE TABLE seen AS SELECT 1 AS one")
        assert through.execute("SELECT one FROM seen").fetchall() == [(1,)]


def test_it_comes_back(postgres_server: servers.PostgresServer) -> None:
    """After a stop or a kill, a start on the same port leads to the same server."""
    with servers.pgbouncer(postgres_server) as bouncer:
        for end in (bouncer.stop, bouncer.kill):
            with connect(bouncer.url) as bystander:
                end()
                with pytest.raises(psycopg.OperationalError):
                    connect(bouncer.url)
                with pytest.raises(psycopg.OperationalError):
                    bystander.execute("SELECT 1")
            bouncer.start()
            with connect(bouncer.url) as connection:
                assert pid(connection)
