"""``Outbox.add``: one row in the caller's transaction, on every driver."""

import base64
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import psycopg
import pytest
import sqlalchemy
from django.db import connection as django_connection
from django.db import transaction
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from semel.errors import ConfigurationError, MessageInvalid, MessageReused, StoreNotReady
from semel.outbox import Outbox
from semel.stores import async_store
from semel.stores.encrypted import Encrypted
from semel.stores.memory import MemoryStore
from semel.stores.tiered import Tiered
from tests.django import project
from tests.natural.entries import POSTGRES, SQLITE, Entry
from tests.outbox.conftest import connect, rows

project.set_up()

ALL = "SELECT aggregatetype, aggregateid, type, state, attempts, content_type, headers, traceparent FROM semel_outbox"
PAIRS = [*((kind, "postgres_url") for kind in POSTGRES), *((kind, "sqlite_url") for kind in SQLITE)]


async def add(outbox: Outbox, entry: Entry, *args: Any, **kwargs: Any) -> str:
    connection: Any = getattr(entry, "connection")  # noqa: B009 - every kind has one, in its own type
    if hasattr(entry, "there"):
        added: str = await entry.there(outbox.add, connection, *args, **kwargs)
        return added
    awaited: str = await outbox.add(connection, *args, **kwargs)
    return awaited


@pytest.mark.parametrize("kind, where", PAIRS, ids=lambda each: getattr(each, "__name__", each))
async def test_on_every_driver(kind: type[Entry], where: str, request: pytest.FixtureRequest) -> None:
    """The message commits with the transaction that it was added in, and goes with it when that is rolled back."""
    url = request.getfixturevalue(where)
    outbox = Outbox(url)
    entry = kind()
    await entry.open(url)
    await add(outbox, entry, "order.paid", {"order": 16}, key="order-16")
    await entry.rollback()
    made = await add(
        outbox, entry, "order.paid", {"order": "17 é"}, key="order-17", to="mail", headers={"Tenant": "acme"}
    )
    assert rows(url, "SELECT count(*) FROM semel_outbox") == [0]
    await entry.commit()
    await entry.close()
    assert UUID(made).version == 7
    assert rows(url, ALL) == [
        ("mail", "order-17", "order.paid", "ready", 0, "application/json", '[["Tenant", "acme"]]', None)
    ]
    (payload,) = rows(url, "SELECT payload FROM semel_outbox")
    assert bytes(payload) == '{"order":"17 é"}'.encode()
    assert [str(each) for each in rows(url, "SELECT id FROM semel_outbox")] == [made]


@pytest.mark.parametrize("where", ["postgres_url", "sqlite_url"])
def test_on_djangos_connection(where: str, request: pytest.FixtureRequest) -> None:
    """With Django, it is what ``transaction.atomic`` commits or rolls back."""
    url = request.getfixturevalue(where)
    outbox = Outbox(url)
    with project.databases(default=url):
        with transaction.atomic():
            outbox.add(django_connection, "order.paid", {"order": "100 %"})
            transaction.set_rollback(True)
        with pytest.raises(ConfigurationError, match=r"transaction\.atomic"):
            outbox.add(django_connection, "order.paid", {})
        with transaction.atomic():
            outbox.add(django_connection, "order.paid", {"order": "100 %"})
    assert [bytes(each) for each in rows(url, "SELECT payload FROM semel_outbox")] == [b'{"order":"100 %"}']


async def test_an_engine_of_a_loop_may_be_behind_a_cache(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an async middleware takes is taken here, too: behind a cache, behind encryption, or behind both."""
    monkeypatch.setenv("SECRETS", base64.b64encode(bytes(range(32))).decode())
    engine = create_async_engine(postgres_url.replace("postgresql://", "postgresql+asyncpg://"))
    cached = Tiered(engine, namespace="shop")
    for each in (
        cached,
        Encrypted(engine, "env:SECRETS"),
        Encrypted(cached, "env:SECRETS"),
        Tiered(async_store(engine)),
    ):
        assert Outbox(each).dialect.name == "postgresql"
    await engine.dispose()


class TestWithoutATransaction:
    """A message that would be committed by itself is refused."""

    def test_psycopg(self, postgres_url: str) -> None:
        """A connection with autocommit has to begin one."""
        with psycopg.connect(postgres_url, autocommit=True) as connection:
            with pytest.raises(ConfigurationError, match=r"No transaction is open.*connection.transaction"):
                Outbox(postgres_url).add(connection, "t", {})
            with connection.transaction():
                Outbox(postgres_url).add(connection, "t", {})
        assert rows(postgres_url, "SELECT count(*) FROM semel_outbox") == [1]

    async def test_asyncpg(self, postgres_url: str) -> None:
        """Asyncpg commits each statement, unless a transaction is open."""
        connection = await asyncpg.connect(postgres_url)
        with pytest.raises(ConfigurationError, match="No transaction is open"):
            await Outbox(postgres_url).add(connection, "t", {})
        await connection.close()

    def test_sqlite(self, sqlite_url: str) -> None:
        """So does sqlite3 without an isolation level."""
        with closing(connect(sqlite_url)) as connection:
            connection.isolation_level = None
            with pytest.raises(ConfigurationError, match="BEGIN IMMEDIATE"):
                Outbox(sqlite_url).add(connection, "t", {})

    @pytest.mark.parametrize("how", ["engine", "option"])
    def test_sqlalchemy(self, url: str, how: str) -> None:
        """In SQLAlchemy's AUTOCOMMIT there is none, wherever it was asked for."""
        address = url.replace("postgresql://", "postgresql+psycopg://")
        if how == "engine":
            engine = sqlalchemy.create_engine(address, isolation_level="AUTOCOMMIT")
        else:
            engine = sqlalchemy.create_engine(address).execution_options(isolation_level="AUTOCOMMIT")
        with engine.connect() as connection, pytest.raises(ConfigurationError, match="No transaction is open"):
            Outbox(url).add(connection, "t", 1)
        with Session(engine) as session, pytest.raises(ConfigurationError, match="No transaction is open"):
            Outbox(url).add(session, "t", 1)
        engine.dispose()

    def test_sqlalchemy_session(self, url: str) -> None:
        """A session can be put into AUTOCOMMIT for one transaction: it is that of its connection that counts."""
        engine = sqlalchemy.create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
        with Session(engine) as session:
            session.connection(execution_options={"isolation_level": "AUTOCOMMIT"})
            with pytest.raises(ConfigurationError, match="No transaction is open"):
                Outbox(url).add(session, "t", 1)
        engine.dispose()

    async def test_sqlalchemy_async_session(self, postgres_url: str) -> None:
        """So it is on an event loop."""
        engine = create_async_engine(postgres_url.replace("postgresql://", "postgresql+asyncpg://"))
        async with AsyncSession(engine) as session:
            await session.connection(execution_options={"isolation_level": "AUTOCOMMIT"})
            with pytest.raises(ConfigurationError, match="No transaction is open"):
                await Outbox(postgres_url).add(session, "t", 1)
        await engine.dispose()

    def test_no_connection(self, url: str) -> None:
        """A pool, an engine or a cursor is no open connection."""
        with pytest.raises(ConfigurationError, match=r"An open connection of psycopg.*this is int"):
            Outbox(url).add(7, "t", {})

    def test_another_database(self, postgres_url: str, sqlite_url: str) -> None:
        """The outbox has to be where the business row is."""
        with (
            closing(connect(sqlite_url)) as connection,
            pytest.raises(ConfigurationError, match="in postgresql, and the connection leads to sqlite"),
        ):
            Outbox(postgres_url).add(connection, "t", {})


class TestStores:
    """What an outbox can be made of."""

    @pytest.mark.parametrize(
        "store", ["redis://localhost/0", "memory://", MemoryStore()], ids=["redis", "memory", "store"]
    )
    def test_none_without_transactions(self, store: Any) -> None:
        """Redis and memory share no transaction with the application, and say so."""
        with pytest.raises(ConfigurationError, match="no outbox, since it has no transaction to join"):
            Outbox(store)

    @pytest.mark.parametrize("how", ["psycopg", "sqlite3", "sqlalchemy"])
    def test_table_is_missing(self, empty_postgres_url: str, tmp_path: Path, how: str) -> None:
        """Where the table is missing, the error says which command makes it; the driver's own is its cause."""
        url = f"sqlite:///{tmp_path / 'empty.db'}" if how == "sqlite3" else empty_postgres_url
        said = r"semel_outbox.*semel migrate"
        if how == "sqlalchemy":
            engine = sqlalchemy.create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
            with Session(engine) as session, pytest.raises(StoreNotReady, match=said) as raised:
                Outbox(url).add(session, "t", {})
            engine.dispose()
        else:
            with closing(connect(url)) as connection, pytest.raises(StoreNotReady, match=said) as raised:
                Outbox(url).add(connection, "t", {})
        assert raised.value.__cause__ is not None

    async def test_table_is_missing_async(self, empty_postgres_url: str) -> None:
        """The same on an event loop."""
        connection = await asyncpg.connect(empty_postgres_url)
        async with connection.transaction():
            with pytest.raises(StoreNotReady, match=r"semel_outbox.*semel migrate"):
                await Outbox(empty_postgres_url).add(connection, "t", {})
            with pytest.raises(asyncpg.InFailedSQLTransactionError):
                await Outbox(empty_postgres_url).add(connection, "t", {})
        await connection.close()

    def test_a_table_of_its_own(self, sqlite_url: str) -> None:
        """``?table=`` names this table, too."""
        named = f"{sqlite_url}?table=billing"
        from semel.stores import store  # noqa: PLC0415 - only here

        with closing(store(named)) as opened:
            opened.migrate()
        with closing(connect(sqlite_url)) as connection:
            Outbox(named).add(connection, "t", {})
            connection.commit()
        assert rows(sqlite_url, "SELECT count(*) FROM billing_outbox") == [1]
        assert rows(sqlite_url, "SELECT count(*) FROM semel_outbox") == [0]


class TestContent:
    """What can be sent."""

    def test_bytes(self, url: str) -> None:
        """Bytes are sent as they are, with their content type."""
        with closing(connect(url)) as connection:
            Outbox(url).add(connection, "t", b"\x00\xff", content_type="application/avro")
            Outbox(url).add(connection, "t", b"")
            Outbox(url).add(connection, "t", "plain", content_type="text/plain")
            Outbox(url).add(connection, "t", "json")
            connection.commit()
        found = rows(url, "SELECT payload, content_type FROM semel_outbox ORDER BY seq")
        assert [(bytes(payload), kind) for payload, kind in found] == [
            (b"\x00\xff", "application/avro"),
            (b"", "application/octet-stream"),
            (b"plain", "text/plain"),
            (b'"json"', "application/json"),
        ]

    @pytest.mark.parametrize(
        "wrong, why",
        [
            ({"payload": object()}, "can't be written as JSON"),
            ({"payload": float("nan")}, "can't be written as JSON"),
            ({"payload": b"x" * (1024 * 1024 + 1)}, "1,048,577 bytes, and 1,048,576 are the limit"),
            ({"headers": {"a b": "c"}}, "not the name of a header"),
            ({"headers": {"a": "b\nc"}}, "not one line of text"),
            ({"headers": {"a": "x" * 20_000}}, "more than"),
            ({"content_type": "té"}, "not a content type"),
            ({"content_type": 5}, "not a content type"),
            ({"headers": "abc"}, "headers are a mapping"),
            ({"traceparent": 5}, "not a traceparent"),
            ({"payload": "\ud800", "content_type": "text/plain"}, "can't be written"),
            ({"traceparent": "zero"}, "not a traceparent"),
            ({"id": "seventeen"}, "not a UUID"),
        ],
        ids=[
            "object",
            "nan",
            "large",
            "header",
            "lines",
            "headers",
            "type",
            "number",
            "text",
            "five",
            "lone",
            "trace",
            "id",
        ],
    )
    def test_wrong(self, url: str, wrong: dict[str, Any], why: str) -> None:
        """What can't be sent is refused before anything is written."""
        given: dict[str, Any] = {"payload": {}} | wrong
        with closing(connect(url)) as connection, pytest.raises(MessageInvalid, match=why):
            Outbox(url).add(connection, "t", given.pop("payload"), **given)

    @pytest.mark.parametrize(
        "wrong",
        [{"to": "a\nb"}, {"to": ""}, {"key": ""}, {"type": ""}, {"source": "\n"}],
        ids=["to", "nowhere", "key", "type", "source"],
    )
    def test_wrong_names(self, url: str, wrong: dict[str, Any]) -> None:
        """Names are printable and not empty: an empty destination is not the usual one."""
        given: dict[str, Any] = {"type": "t"} | wrong
        with closing(connect(url)) as connection, pytest.raises(MessageInvalid, match="printable"):
            Outbox(url).add(connection, given.pop("type"), {}, **given)

    def test_cloudevents(self, url: str) -> None:
        """``source`` adds the headers of CloudEvents, with the message's own id."""
        with closing(connect(url)) as connection:
            made = Outbox(url).add(connection, "order.paid", {}, source="https://shop.example/orders")
            connection.commit()
        (headers,) = rows(url, "SELECT headers FROM semel_outbox")
        for pair in (["ce-id", made], ["ce-type", "order.paid"], ["ce-source", "https://shop.example/orders"]):
            assert f'["{pair[0]}", "{pair[1]}"]' in headers

    def test_the_same_twice(self, url: str) -> None:
        """A message with an id that is there already is the same message, or an error."""
        outbox, given = Outbox(url), uuid4()
        with closing(connect(url)) as connection:
            assert outbox.add(connection, "t", {"n": 1}, id=given) == str(given)
            assert outbox.add(connection, "t", {"n": 1}, id=str(given)) == str(given)
            with pytest.raises(MessageReused, match=str(given)):
                outbox.add(connection, "t", {"n": 2}, id=given)
            connection.commit()
        assert rows(url, "SELECT count(*) FROM semel_outbox") == [1]


def test_debezium_can_read_it(postgres_url: str) -> None:
    """The columns have the names and types that Debezium's outbox event router expects."""
    found = rows(
        postgres_url,
        "SELECT column_name, data_type FROM information_schema.columns WHERE table_name = 'semel_outbox' "
        "AND column_name IN ('id', 'aggregatetype', 'aggregateid', 'type', 'payload') ORDER BY 1",
    )
    assert found == [
        ("aggregateid", "text"),
        ("aggregatetype", "text"),
        ("id", "uuid"),
        ("payload", "bytea"),
        ("type", "text"),
    ]


def test_sqlite_in_a_transaction_of_another_kind(sqlite_url: str) -> None:
    """A connection with another row factory is read all the same."""
    with closing(connect(sqlite_url)) as connection:
        connection.row_factory = sqlite3.Row
        Outbox(sqlite_url).add(connection, "t", {})
        connection.commit()
    assert rows(sqlite_url, "SELECT count(*) FROM semel_outbox") == [1]


def test_in_a_pipeline(postgres_url: str) -> None:
    """In psycopg's pipeline mode, where results come later, a message is added as ever, and a reused id is found."""
    outbox = Outbox(postgres_url)
    with psycopg.connect(postgres_url) as connection, connection.pipeline():
        made = outbox.add(connection, "order.paid", 1)
        assert outbox.add(connection, "order.paid", 2) != made
    with psycopg.connect(postgres_url) as connection, pytest.raises(MessageReused), connection.pipeline():
        outbox.add(connection, "order.paid", 3, id=made)
    assert rows(postgres_url, "SELECT count(*) FROM semel_outbox") == [2]


async def test_in_an_async_pipeline(postgres_url: str) -> None:
    """The same on an event loop."""
    outbox = Outbox(postgres_url)
    async with await psycopg.AsyncConnection.connect(postgres_url) as connection, connection.pipeline():
        await outbox.add(connection, "order.paid", 1)
    assert rows(postgres_url, "SELECT count(*) FROM semel_outbox") == [1]
