"""SQLAlchemy's ORM: models in place of tables, objects in place of rows."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import (
    ARRAY,
    JSON,
    Boolean,
    Column,
    DateTime,
    Enum,
    Float,
    ForeignKey,
    Integer,
    Interval,
    LargeBinary,
    MetaData,
    Numeric,
    String,
    Table,
    UniqueConstraint,
    Uuid,
    create_engine,
    delete,
    event,
    func,
    select,
    update,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.engine import Dialect, Engine
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, relationship, scoped_session, sessionmaker
from sqlalchemy.types import TypeDecorator

from semel.errors import ConfigurationError
from semel.natural import RowDiffers, insert_or_get
from tests.natural.entries import with_driver


class Base(DeclarativeBase):
    pass


class Cents(TypeDecorator[Decimal]):
    """Euros in Python, whole cents in the database."""

    impl = Integer
    cache_ok = True

    def process_bind_param(self, value: Decimal | None, dialect: Dialect) -> int | None:
        return None if value is None else int(value * 100)

    def process_result_value(self, value: int | None, dialect: Dialect) -> Decimal | None:
        return None if value is None else Decimal(value) / 100


class Merchant(Base):
    __tablename__ = "merchants"
    id: Mapped[int] = mapped_column(primary_key=True)


class Order(Base):
    __tablename__ = "orders"
    __table_args__ = (UniqueConstraint("merchant_id", "order_number"),)
    id: Mapped[int] = mapped_column(primary_key=True)
    merchant_id: Mapped[int] = mapped_column(ForeignKey("merchants.id"))
    number: Mapped[str] = mapped_column("order_number", String(20))
    total: Mapped[Decimal | None] = mapped_column(Cents)
    rate: Mapped[Decimal | None] = mapped_column(Numeric(6, 3))
    lines: Mapped[Any] = mapped_column(JSON)
    status: Mapped[str] = mapped_column(default=lambda: "new")
    place: Mapped[str] = mapped_column(server_default="here")
    merchant: Mapped[Merchant] = relationship()
    notes: Mapped[list[Note]] = relationship(lazy="joined")


class Note(Base):
    __tablename__ = "notes_of_orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    order_id: Mapped[int] = mapped_column(ForeignKey("orders.id"))


class Animal(Base):
    __tablename__ = "animals"
    __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": "animal"}  # noqa: RUF012 - as SQLAlchemy has it
    id: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str]


KEY = ("merchant_id", "number")
ORDER: dict[str, Any] = {
    "merchant_id": 7,
    "number": "A-17",
    "total": Decimal("19.99"),
    "rate": Decimal("0.0625"),  # The column keeps three places of it.
    "lines": {"tea": 2},
}


@pytest.fixture(params=["postgres_url", "sqlite_url"])
def url(request: pytest.FixtureRequest) -> str:
    found: str = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def engine(url: str) -> Iterator[Engine]:
    made = create_engine(with_driver(url, "psycopg"))
    Base.metadata.create_all(made)
    with Session(made) as session:
        session.add(Merchant(id=7))
        session.commit()
    yield made
    made.dispose()


@pytest.fixture
def session(engine: Engine) -> Iterator[Session]:
    with Session(engine) as opened:
        yield opened


@pytest.fixture
async def sessions(url: str, engine: Engine) -> AsyncIterator[async_sessionmaker[AsyncSession]]:
    made = create_async_engine(with_driver(url, "asyncpg"))
    yield async_sessionmaker(made)
    await made.dispose()


def check(order: Order, session: Session) -> None:
    assert order in session
    assert (order.number, order.total, order.lines) == ("A-17", Decimal("19.99"), {"tea": 2})
    assert (order.status, order.place) == ("new", "here")


def test_objects(session: Session) -> None:
    """What comes back is an object of the session, made with the model's defaults, types and attribute names."""
    new = insert_or_get(session, Order, ORDER, unique=KEY)
    check(new.row, session)
    first = new.row.id
    session.commit()
    session.expunge_all()
    stored = insert_or_get(session, Order, ORDER, unique=KEY)
    check(stored.row, session)
    assert (new.is_new, stored.is_new, stored.row.id) == (True, False, first)


def test_one_object(session: Session) -> None:
    """A session has one object for a row, however often it is asked for, and changes to it are saved."""
    first, again = (insert_or_get(session, Order, ORDER, unique=KEY).row for _ in range(2))
    assert first is again
    first.status = "paid"
    session.commit()
    assert session.scalars(select(Order.status)).all() == ["paid"]


def test_differs(session: Session) -> None:
    """Differences go by the attributes' names."""
    insert_or_get(session, Order, ORDER, unique=KEY)
    other = ORDER | {"total": Decimal(20), "lines": {"tea": 3}}
    assert insert_or_get(session, Order, other, unique=KEY, same="rate").differs == ("total", "lines")
    with pytest.raises(RowDiffers, match=r"^Order: .* \(merchant_id, number\) differs .* in total, lines\."):
        insert_or_get(session, Order, other, unique=KEY)


def test_read_again(engine: Engine, session: Session) -> None:
    """What the session held of the stored row is read again, and what it had changed is not lost."""
    held = insert_or_get(session, Order, ORDER, unique=KEY).row
    session.commit()
    assert held.status == "new"
    with Session(engine) as other:
        other.execute(update(Order).values(status="paid"))
        other.commit()
    held.place = "there"
    got = insert_or_get(session, Order, ORDER, unique=KEY)
    assert got.row is held
    assert (held.status, held.place) == ("paid", "there")


def test_flushes_first(engine: Engine) -> None:
    """What the row refers to may be pending still, even where nothing else would flush it."""
    with Session(engine, autoflush=False) as session:
        session.add(Merchant(id=8))
        got = insert_or_get(session, Order, ORDER | {"merchant_id": 8}, unique=KEY)
        assert got.row.merchant.id == 8


def test_collections(session: Session) -> None:
    """A collection that is loaded by a join comes along, and the row is one row."""
    order = insert_or_get(session, Order, ORDER, unique=KEY).row
    order.notes += [Note(), Note()]
    session.commit()
    session.expunge_all()
    assert len(insert_or_get(session, Order, ORDER, unique=KEY).row.notes) == 2


def test_no_events(session: Session) -> None:
    """No event of inserting is fired for the row: it did not come through the unit of work."""
    heard: list[Order] = []

    def hear(_mapper: object, _connection: object, target: Order) -> None:
        heard.append(target)

    event.listen(Order, "before_insert", hear)
    try:
        assert insert_or_get(session, Order, ORDER, unique=KEY).is_new
    finally:
        event.remove(Order, "before_insert", hear)
    assert heard == []


async def test_async_objects(sessions: async_sessionmaker[AsyncSession]) -> None:
    """On an event loop it is the same, awaited."""
    async with sessions() as session:
        new = await insert_or_get(session, Order, ORDER, unique=KEY)
        check(new.row, session.sync_session)
        await session.commit()
    async with sessions() as session:
        stored = await insert_or_get(session, Order, ORDER, unique=KEY)
        check(stored.row, session.sync_session)
        assert (new.is_new, stored.is_new) == (True, False)


async def test_scoped_sessions(engine: Engine, sessions: async_sessionmaker[AsyncSession]) -> None:
    """A scoped session stands for the session of its scope."""
    scoped = scoped_session(sessionmaker(engine))
    assert insert_or_get(scoped, Order, ORDER, unique=KEY).is_new
    scoped.commit()
    scoped.remove()
    async_scoped = async_scoped_session(sessions, scopefunc=lambda: 1)
    assert not (await insert_or_get(async_scoped, Order, ORDER, unique=KEY)).is_new
    await async_scoped.remove()


def test_several_databases(engine: Engine) -> None:
    """A session that has a database for each model uses that of the model, or of the table."""
    with Session(binds={Order: engine, Merchant: engine}) as session:
        assert insert_or_get(session, Order, ORDER, unique=KEY).is_new
        assert not insert_or_get(session, Order, ORDER, unique=KEY).is_new
        table = Order.metadata.tables["orders"]
        row = {"order_number" if name == "number" else name: value for name, value in ORDER.items()}
        assert not insert_or_get(session, table, row, unique=("merchant_id", "order_number")).is_new


def test_predicate_as_an_expression(session: Session) -> None:
    """The predicate of a partial index may be an expression of SQLAlchemy's."""
    session.connection().exec_driver_sql("CREATE UNIQUE INDEX one ON orders (order_number) WHERE status = 'open'")
    session.connection().exec_driver_sql("CREATE UNIQUE INDEX two ON orders (order_number) WHERE place IN ('a', 'b')")
    row = ORDER | {"status": "open", "place": "a"}
    for where in (Order.status == "open", Order.place.in_(["a", "b"])):
        got = [insert_or_get(session, Order, row, unique="number", where=where) for _ in range(2)]
        assert [each.is_new for each in got] == [True, False]
        session.execute(delete(Order))


def test_keys_of_columns(session: Session) -> None:
    """A table's columns go by their keys, in what is given and in what comes back."""
    notes = Table("notes", MetaData(), Column("note_id", Integer, key="id", unique=True), Column("said", String))
    notes.create(session.connection())
    got = [insert_or_get(session, notes, {"id": 1, "said": "hi"}, unique="id") for _ in range(2)]
    assert [(each.is_new, each.row) for each in got] == [
        (True, {"id": 1, "said": "hi"}),
        (False, {"id": 1, "said": "hi"}),
    ]


#: A type of SQLAlchemy's, and two values of it.
TYPES: list[tuple[Any, Any, Any]] = [
    (Boolean(), True, False),
    (DateTime(timezone=True), datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 1, 2, tzinfo=UTC)),
    (Enum("glad", "sad", name="mood"), "glad", "sad"),
    (Float(), 0.1, 0.2),
    (Interval(), timedelta(hours=1), timedelta(hours=2)),
    (JSON(), {"a": [1, None]}, None),
    (JSON().with_variant(JSONB(), "postgresql"), {"a": [1, None]}, {"a": []}),
    (JSON().with_variant(ARRAY(String()), "postgresql"), ["a", "b"], []),
    (LargeBinary(), b"\0\1", b""),
    (Numeric(10, 2), Decimal("0.125"), Decimal("0.15")),
    (Uuid(), UUID(int=1), UUID(int=2)),
]


@pytest.mark.parametrize("kind, value, other", TYPES)
async def test_values(url: str, kind: Any, value: Any, other: Any) -> None:
    """A value is written and compared as its type has it, with either driver."""
    kept = Table("kept", MetaData(), Column("id", Integer, primary_key=True), Column("value", kind))
    engine = create_async_engine(with_driver(url, "asyncpg"))
    async with engine.begin() as connection:
        await connection.run_sync(kept.create)
        for each, is_new, differs in ((value, True, ()), (value, False, ()), (other, False, ("value",))):
            got = await insert_or_get(connection, kept, {"id": 1, "value": each}, unique="id", same=())
            assert (got.is_new, got.differs) == (is_new, differs)
    await engine.dispose()
    sync_engine = create_engine(with_driver(url, "psycopg"))
    with sync_engine.begin() as plain:
        for each, differs in ((value, ()), (other, ("value",))):
            again = insert_or_get(plain, kept, {"id": 1, "value": each}, unique="id", same=())
            assert (again.is_new, again.differs) == (False, differs)
    sync_engine.dispose()


class Blank(TypeDecorator[str]):
    """Forms send empty strings where they mean nothing."""

    impl = String
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: object) -> Any:
        return value or None

    def process_result_value(self, value: Any, dialect: object) -> Any:
        return value or ""


def test_a_key_that_is_stored_as_null(engine: Engine) -> None:
    """A column's type may make NULL of a key, and of NULL the key again: that is refused, since nothing is a retry."""
    table = Table("forms", MetaData(), Column("number", Blank, unique=True))
    with engine.connect() as connection:
        table.create(connection)
        with pytest.raises(ConfigurationError, match=r"\(number\) is NULL .* Roll back"):
            insert_or_get(connection, table, {"number": ""}, unique="number")


def test_translated_schema(postgres_url: str) -> None:
    """A schema that is put in on execution is the one that is asked about its columns, too."""
    engine = create_engine(
        with_driver(postgres_url, "psycopg"), execution_options={"schema_translate_map": {"tenant": "Tenant 7"}}
    )
    notes = Table("notes", MetaData(), Column("id", Integer, unique=True), Column("said", JSON), schema="tenant")
    with engine.begin() as connection:
        connection.exec_driver_sql('CREATE SCHEMA "Tenant 7"')
        notes.create(connection)
        got = [insert_or_get(connection, notes, {"id": 1, "said": {"a": 1}}, unique="id") for _ in range(2)]
    assert [each.is_new for each in got] == [True, False]
    engine.dispose()


@pytest.mark.parametrize(
    "into, values, message",
    [
        (Order, {"merchant_id": 7, "number": "1", "totl": 5}, "Order has no column 'totl'. It has: id, lines, "),
        (Order, {"merchant_id": 7, "number": "1", "merchant": Merchant()}, "Order has no column 'merchant'"),
        (Order, {"merchant_id": 7, "number": "1", "status": func.now()}, "'status' is given as an SQL expression"),
        (Animal, {"merchant_id": 7, "number": "1"}, "Animal is mapped with inheritance"),
        ("orders", {"merchant_id": 7, "number": "1"}, "needs a Table or a mapped class, not 'orders'"),
        (dict, {"merchant_id": 7, "number": "1"}, "needs a Table or a mapped class, not 'dict'"),
    ],
)
def test_wrong_question(into: Any, values: dict[str, Any], message: str) -> None:
    """What can't be right is refused before a connection is even taken."""
    with Session() as nowhere, pytest.raises(ConfigurationError, match=message):
        insert_or_get(nowhere, into, values, unique=KEY)


def test_model_on_a_connection(engine: Engine) -> None:
    """Objects belong to sessions."""
    with engine.connect() as connection, pytest.raises(ConfigurationError, match="Give a Session, or the table"):
        insert_or_get(connection, Order, ORDER, unique=KEY)


def test_other_databases(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A database that says it in other words is refused; and so is a SQLite without RETURNING."""
    with Session(engine) as session:
        monkeypatch.setattr(engine.dialect, "insert_returning", False)
        with pytest.raises(ConfigurationError, match=r"SQLite 3\.35 or newer"):
            insert_or_get(session, Order, ORDER, unique=KEY)
        monkeypatch.setattr(engine.dialect, "name", "mysql")
        with pytest.raises(ConfigurationError, match="and not on mysql"):
            insert_or_get(session, Order, ORDER, unique=KEY)
