"""The console on PostgreSQL: every page, what a role may not see, and a schema that is not there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import psycopg
import pytest

from semel.console.access import User
from semel.console.http import Request
from semel.console.site import Site
from tests.console.test_site import check_guards
from tests.console.visitor import ALL, Visitor, operation, text_of
from tests.console.world import FINISHED, PARKED, STUCK, World, fill
from tests.kit.servers.base import until


@pytest.fixture
def world(migrated_postgres_url: str) -> Iterator[World]:
    made = World(migrated_postgres_url)
    fill(made, many=8)
    yield made
    made.close()


def test_pages(world: World) -> None:
    """Every page is read from PostgreSQL, and an action is carried out and noted."""
    visitor = Visitor(Site(world.url, lambda _: None), User("ada", ALL))
    said = text_of(visitor.get("/"))
    assert "31,000 of 50,000 rows" in said
    assert "hook-acme" in said
    for place in ("/operations", "/outbox", "/inbox", "/webhooks", operation(FINISHED), operation(PARKED)):
        assert visitor.get(place).status == 200, place
    for query in ("state=stuck", "state=stuck&endpoint=transfers&age=%3E1m", f"key={STUCK}"):
        assert operation(STUCK) in visitor.page(f"/operations?{query}")
    assert visitor.act(f"{operation(PARKED)}/not-applied").status == 303
    assert "asked the provider" in text_of(visitor.get(operation(PARKED)))
    visitor.site.close()


def test_guards(world: World) -> None:
    """What has changed between the look and the statement is left alone by the statement itself."""
    check_guards(world)


def test_a_role_without_rights(world: World) -> None:
    """A role that may not read a table is told so: in its part of the page, or on a page of its own."""
    with psycopg.connect(world.url, autocommit=True) as connection:
        (name,) = connection.execute("SELECT 'reader_' || substr(md5(random()::text), 1, 8)").fetchone() or ("",)
        connection.execute(f"CREATE ROLE {name} LOGIN")
        try:
            connection.execute(f"GRANT SELECT ON semel_keys, semel_keys_watermark, semel_audit TO {name}")
            url = world.url.replace("//semel@", f"//{name}@")
            assert name in url
            visitor = Visitor(Site(url, lambda _: None), User("ada", ALL))
            overview = visitor.get("/")
            assert overview.status == 200, text_of(overview)
            assert "can't be read" in text_of(overview)
            assert visitor.get("/outbox").status == 503
            connection.execute(f"REVOKE SELECT ON semel_keys FROM {name}")
            refused = visitor.get("/operations")
            assert refused.status == 503
            assert "Traceback" not in refused.body.decode()
            visitor.site.close()
        finally:
            connection.execute(f"DROP OWNED BY {name}")
            connection.execute(f"DROP ROLE {name}")


def test_a_table_that_is_locked(world: World) -> None:
    """A lock on the table of messages keeps no page waiting: the rest is shown, and what is missing is said."""
    visitor = Visitor(Site(world.url, lambda _: None), User("ada", ALL))
    with psycopg.connect(world.url) as connection:
        connection.execute("LOCK TABLE semel_outbox IN ACCESS EXCLUSIVE MODE")
        overview = visitor.get("/")
        assert overview.status == 200
        assert "The outbox can't be read" in text_of(overview)
        assert "statement timeout" in text_of(visitor.get("/outbox"))
    assert visitor.get("/outbox").status == 200
    visitor.site.close()


def test_what_can_not_be_held(world: World) -> None:
    """NUL, which PostgreSQL can't hold, is a 400 in a filter, and a 404 in an address."""
    visitor = Visitor(Site(world.url, lambda _: None), User("ada", ALL))
    for place in ("/operations?key=%00x", "/operations?scope=%5Cx00", "/operations?reason=%00x", "/outbox?to=%00"):
        assert visitor.get(place).status == 400, place
    assert visitor.get(operation("\0")).status == 404
    visitor.site.close()


def test_an_empty_database(empty_postgres_url: str) -> None:
    """A database without Semel's tables is a page that says what to run."""
    site = Site(empty_postgres_url, lambda _: None)
    response = site.respond(Request("GET", "/", user=User("ada")))
    assert response.status == 503
    assert "semel migrate" in response.body.decode()
    site.close()


MANY = 30_000
#: Whatever is stuck, dead or waits: each page reads so many rows of one table at most.
MAX_READ = 12_000
PAGES = ("/", "/outbox", "/outbox?to=to-3", "/outbox?state=dead&to=to-7", "/inbox", "/operations?state=stuck")
_FILL = (
    """
    INSERT INTO semel_keys (scope, key, state, attempt, token, fingerprint, created_at, lease_expires_at, expires_at,
                            upkeep)
    SELECT 'a', n::text, CASE n %% 3 WHEN 0 THEN 'unknown' ELSE 'processing' END, 1, decode(repeat('01', 16), 'hex'),
           decode('00', 'hex'), now() - n * interval '1 second',
           CASE WHEN n %% 3 > 0 THEN now() - interval '1 day' END, now() + interval '1 day',
           CASE n %% 3 WHEN 0 THEN 'parked' ELSE 'open' END
      FROM generate_series(1, %(many)s) AS n
    """,
    """
    INSERT INTO semel_outbox (id, aggregatetype, aggregateid, type, state, ended_at, due_at, content_type, payload)
    SELECT gen_random_uuid(), 'to-' || n %% 100, 'order-' || n, 'paid',
           CASE n %% 4 WHEN 0 THEN 'dead' WHEN 1 THEN 'waiting' WHEN 2 THEN 'behind' ELSE 'ready' END,
           CASE n %% 4 WHEN 0 THEN now() END, CASE n %% 4 WHEN 1 THEN now() END, 'text/plain', ''
      FROM generate_series(1, %(many)s) AS n
    """,
    """
    INSERT INTO semel_inbox (consumer, message_id, state, attempts)
    SELECT 'consumer-' || n %% 40, n::text, CASE n %% 2 WHEN 0 THEN 'parked' ELSE 'failing' END, 3
      FROM generate_series(1, %(many)s) AS n
    """,
    "INSERT INTO semel_keys_watermark (swept_to) VALUES (now() - interval '15 seconds') ON CONFLICT DO NOTHING",
)


@pytest.mark.slow
@pytest.mark.parametrize("is_analysed", [False, True], ids=["never analysed", "analysed"])
def test_what_a_page_reads(migrated_postgres_url: str, is_analysed: bool) -> None:
    """However many operations are stuck or parked, and messages dead, parked or waiting, a page reads a part of them,
    whatever the server knows of its tables. The server's own counters say so.
    """
    with psycopg.connect(migrated_postgres_url, autocommit=True) as connection:
        for statement in _FILL:
            connection.execute(statement, {"many": MANY})
        if is_analysed:
            connection.execute("ANALYZE")
    for place in PAGES:
        before = _rows_read(migrated_postgres_url)
        site = Site(migrated_postgres_url, lambda _: None)
        site.reader.findings = None
        with closing(site):
            assert Visitor(site, User("ada", ALL)).get(place).status == 200
        after = _rows_read(migrated_postgres_url)
        read = {name: after[name] - before[name] for name in after}
        assert {name: number for name, number in read.items() if number > MAX_READ} == {}, place


def _rows_read(url: str) -> dict[str, int]:
    """Return how many rows of each table, or entries of its indexes, were ever read by sessions that have ended."""
    with psycopg.connect(url, autocommit=True) as connection:
        until("all other sessions have ended", lambda: _others(connection) == 0)
        connection.execute("SELECT pg_stat_clear_snapshot()")
        rows = connection.execute(
            "SELECT relname, coalesce(seq_tup_read, 0) + coalesce("
            "       (SELECT sum(idx_tup_read) FROM pg_stat_user_indexes AS one WHERE one.relid = tables.relid), 0)"
            "  FROM pg_stat_user_tables AS tables"
        ).fetchall()
    return {name: int(number) for name, number in rows}


def _others(connection: psycopg.Connection) -> int:
    (number,) = connection.execute(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        "   AND backend_type = 'client backend'"
    ).fetchone() or (0,)
    return int(number)
