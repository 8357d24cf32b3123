"""Databases, roles and connections that can't carry every character: made good, or refused before a handler runs."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit
from uuid import uuid4

import asyncpg
import psycopg
import pytest

from semel.core.commands import Look, Open, Save, Verdict
from semel.core.record import Hold
from semel.core.recovery import Done, Progress, written
from semel.errors import StoreNotReady
from semel.stores.connections.asyncpg import AsyncpgConnections
from tests.conftest import migrate
from tests.stores.colours import COLOURS, process
from tests.stores.connections.lending import DRIVERS, SQLALCHEMY
from tests.stores.postgres.test_steps import claim

#: Of the result of an effect, as other services answer.
CHARGED = Progress((Done("effect", "charged", {"name": "Ann \N{SNOWMAN}", "note": "\N{GRINNING FACE}"}),))


def execute(url: str, sql: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(sql.encode())


@pytest.fixture(params=["LATIN1", "SQL_ASCII"])
def other_url(request: pytest.FixtureRequest, postgres_url: str) -> Iterator[str]:
    """The URL of a database that is not encoded in UTF-8."""
    name = f"semel_{uuid4().hex}"
    execute(postgres_url, f"CREATE DATABASE {name} ENCODING '{request.param}' LOCALE 'C' TEMPLATE template0")
    yield urlsplit(postgres_url)._replace(path=f"/{name}").geturl()
    execute(postgres_url, f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def latin_url(migrated_postgres_url: str) -> str:
    """The URL of a database with Semel's tables, where every connection has another encoding unless it asks."""
    name = urlsplit(migrated_postgres_url).path[1:]
    execute(migrated_postgres_url, f"ALTER DATABASE {name} SET client_encoding = 'LATIN1'")
    return migrated_postgres_url


class TestDatabase:
    @pytest.mark.parametrize("colour", COLOURS)
    def test_is_refused_at_once(self, other_url: str, colour: str) -> None:
        """A store in a database that is not in UTF-8 refuses its first claim, and says which database to make."""
        with process(colour, other_url) as it, pytest.raises(StoreNotReady, match="ENCODING 'UTF8' TEMPLATE template0"):
            it.perform(claim())

    def test_is_not_migrated(self, other_url: str) -> None:
        """No tables are made there."""
        with pytest.raises(StoreNotReady, match="ENCODING 'UTF8' TEMPLATE template0"):
            migrate(other_url)

    @pytest.mark.parametrize("kind", ["psycopg", "asyncpg"])
    async def test_no_handler_runs(self, other_url: str, kind: str) -> None:
        """In atomic mode neither."""
        async with DRIVERS[kind](other_url) as lender:
            with pytest.raises(StoreNotReady, match="ENCODING 'UTF8'"):
                await lender.begin()


class TestOwnConnections:
    @pytest.mark.parametrize("colour", COLOURS)
    @pytest.mark.parametrize("where", ["database", "url", "environment"])
    def test_carry_everything(self, latin_url: str, colour: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """An effect's result is recorded, whatever encoding the database, the URL or the environment ask for."""
        if where == "environment":
            monkeypatch.setenv("PGCLIENTENCODING", "LATIN1")
        with process(colour, latin_url + ("?client_encoding=LATIN1" if where == "url" else "")) as it:
            mine = claim()
            hold = it.perform(mine)
            assert isinstance(hold, Hold)
            assert it.perform(Save(hold, CHARGED, Progress())) is Verdict.DONE
            record = it.perform(Look(mine.scope, mine.key))
        assert record is not None
        assert record.steps == written(CHARGED)

    @pytest.mark.parametrize("kind", ["psycopg", "asyncpg"])
    async def test_lent_carry_everything(self, latin_url: str, kind: str) -> None:
        """So do those that a handler writes in, and after a handler that has changed it for its session, too."""
        async with DRIVERS[kind](latin_url) as lender:
            for _ in range(3):
                lent = await lender.begin()
                await lent.execute("SELECT 'x' WHERE '\N{SNOWMAN}' = ''")
                await lent.execute("SET client_encoding = 'LATIN1'")
                await lent.commit()


#: asyncpg asks for UTF-8 by itself, unless it is told otherwise.
GIVEN = {name: kind for name, kind in (DRIVERS | SQLALCHEMY).items() if "asyncpg" not in name and name != "psycopg"}


@pytest.mark.parametrize("kind", GIVEN)
async def test_given_connections_are_refused(latin_url: str, kind: str) -> None:
    """Connections of an application's that can't carry every character are refused before its handler runs."""
    async with GIVEN[kind](latin_url) as lender:
        with pytest.raises(StoreNotReady, match=r"client_encoding = LATIN1.*ALTER ROLE"):
            await lender.begin()


async def test_given_asyncpg_is_refused(migrated_postgres_url: str) -> None:
    """So is a pool of asyncpg's that was told to have another."""
    async with asyncpg.create_pool(
        migrated_postgres_url, min_size=0, server_settings={"client_encoding": "LATIN1"}
    ) as pool:
        with pytest.raises(StoreNotReady, match="client_encoding = LATIN1"):
            await AsyncpgConnections.of(pool).begin(Open())
