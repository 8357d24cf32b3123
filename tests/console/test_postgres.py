"""The console on PostgreSQL: every page, what a role may not see, and a schema that is not there."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest

from semel.console.access import User
from semel.console.http import Request
from semel.console.site import Site
from tests.console.visitor import ALL, Visitor, operation, text_of
from tests.console.world import FINISHED, PARKED, STUCK, World, fill


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
