"""What is special to PostgreSQL: who waits for whom, what a snapshot hides, and what is the same value."""

import asyncio
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any
from uuid import UUID

import asyncpg
import psycopg
import pytest
from psycopg.rows import dict_row
from psycopg.types.json import Json, Jsonb

from semel.errors import ConfigurationError
from semel.natural import Got, RowDiffers, RowNotSeen, insert_or_get
from semel.natural.asked import Asked
from semel.natural.flow import Rows
from semel.natural.flow import insert_or_get as flow
from semel.natural.text import PostgresText, Query, as_dict, plain
from tests.natural.conftest import Opener
from tests.natural.entries import KEY

PATIENCE = 30  # Seconds, for what takes milliseconds.
ORDER = {"merchant": 7, "number": "A-17"}


@pytest.fixture
def watcher(postgres_shop: str) -> Iterator[psycopg.Connection]:
    """A connection beside those that are tested."""
    with psycopg.connect(postgres_shop, autocommit=True) as connection:
        yield connection


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not holds():  # noqa: ASYNC110 - it is the server that knows, and it tells only who asks
            await asyncio.sleep(0.01)


def is_somebody_waiting(watcher: psycopg.Connection) -> bool:
    waiting = "SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    return watcher.execute(waiting).fetchone() is not None


class TestRivals:
    """Two transactions at one key."""

    async def test_the_first_commits(self, open_postgres: Opener, watcher: psycopg.Connection) -> None:
        """The second waits for the end of the first, then gets its row."""
        first, second = await open_postgres(), await open_postgres()
        made = await first.order(total=500)
        waiting = asyncio.ensure_future(second.order(total=500))
        await until(lambda: is_somebody_waiting(watcher))
        assert not waiting.done()
        await first.commit()
        got = await waiting
        assert (made.is_new, got.is_new, got.row) == (True, False, made.row)

    async def test_the_first_rolls_back(self, open_postgres: Opener, watcher: psycopg.Connection) -> None:
        """The second waits for the end of the first, then is the one that inserts."""
        first, second = await open_postgres(), await open_postgres()
        assert (await first.order(total=500)).is_new
        waiting = asyncio.ensure_future(second.order(total=600))
        await until(lambda: is_somebody_waiting(watcher))
        await first.rollback()
        got = await waiting
        assert (got.is_new, got.row["total"]) == (True, 600)

    async def test_other_content_meanwhile(self, open_postgres: Opener, watcher: psycopg.Connection) -> None:
        """Whoever waited with other content is refused, and its transaction can go on."""
        first, second = await open_postgres(), await open_postgres()
        await first.order(total=500)
        waiting = asyncio.ensure_future(second.order(total=600))
        await until(lambda: is_somebody_waiting(watcher))
        await first.commit()
        with pytest.raises(RowDiffers):
            await waiting
        assert (await second.order(8)).is_new
        await second.commit()


async def test_replay_writes_nothing(open_postgres: Opener, watcher: psycopg.Connection) -> None:
    """A stored row is not touched: it has one version for ever, and the transaction that got it has written nothing."""
    watcher.execute("ALTER TABLE orders DROP COLUMN id")  # A sequence goes on, and that is a write of its own.
    entry = await open_postgres()
    into = entry.orders if isinstance(entry.orders, str) else without_id(entry.orders)
    await entry.ask(into, ORDER, unique=KEY)
    await entry.commit()
    before = watcher.execute("SELECT ctid, xmin, xmax FROM orders").fetchone()
    assert not (await entry.ask(into, ORDER, unique=KEY)).is_new
    await entry.run("DO $$ BEGIN ASSERT pg_current_xact_id_if_assigned() IS NULL; END $$")
    await entry.commit()
    assert watcher.execute("SELECT ctid, xmin, xmax FROM orders").fetchone() == before


def without_id(table: Any) -> Any:
    from sqlalchemy import Column, MetaData, Table  # noqa: PLC0415 - for two entry points only

    return Table("orders", MetaData(), *(Column(each.name, each.type) for each in table.c if each.name != "id"))


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
async def test_hidden_by_the_snapshot(open_postgres: Opener, watcher: psycopg.Connection, level: str) -> None:
    """Above READ COMMITTED a rival's later row can't be seen: the driver's own error says so, and what to do."""
    entry = await open_postgres()
    await entry.run(f"SET TRANSACTION ISOLATION LEVEL {level}")
    await entry.run("SELECT FROM orders")
    watcher.execute("INSERT INTO orders (merchant, number) VALUES (7, 'A-17')")
    with pytest.raises(Exception, match="could not serialize access") as raised:
        await entry.order()
    (note,) = raised.value.__notes__
    assert "run the whole transaction again; or use READ COMMITTED" in note
    await entry.rollback()
    assert not (await entry.order()).is_new


def steps(watcher: psycopg.Connection, *deletes: bool) -> Got[dict[str, Any]]:
    """Go through the flow by hand, and let a rival delete the row after those insertions that find it."""
    asked = Asked.of("orders", ORDER, unique=KEY)
    language = PostgresText(asked, plain(asked, "orders"), "${}".format, as_dict)
    going = flow(language)
    deleting = iter(deletes)
    try:
        query = next(going)
        while True:
            rows = perform(watcher, query)
            if query.sql.startswith("INSERT") and next(deleting, False):
                watcher.execute("DELETE FROM orders")
            query = going.send(rows)
            if query.sql.startswith("INSERT") and next(deleting, False):
                watcher.execute("INSERT INTO orders (merchant, number) VALUES (7, 'A-17')")
    except StopIteration as end:
        got: Got[dict[str, Any]] = end.value
        return got


def perform(connection: psycopg.Connection, query: Query) -> Rows:
    with psycopg.RawCursor(connection) as cursor:
        cursor.execute(query.sql, query.parameters)
        return Rows(tuple(column.name for column in cursor.description or ()), cursor.fetchall())


class TestDeletedBetween:
    """A row that is there when we insert, and gone when we look."""

    @pytest.fixture(autouse=True)
    def stored(self, watcher: psycopg.Connection) -> None:
        watcher.execute("INSERT INTO orders (merchant, number) VALUES (7, 'A-17')")

    def test_inserts_after_all(self, watcher: psycopg.Connection) -> None:
        """It is tried again, and inserted."""
        assert steps(watcher, True).is_new

    def test_back_again(self, watcher: psycopg.Connection) -> None:
        """It is tried again, and if the row is back, it is got."""
        assert not steps(watcher, True, True).is_new

    def test_without_end(self, watcher: psycopg.Connection) -> None:
        """That goes on ten times, and ends with an error: never with nothing."""
        with pytest.raises(RowNotSeen, match="in 10 tries"):
            steps(watcher, *[True] * 20)


async def test_hidden_by_a_policy(open_postgres: Opener, watcher: psycopg.Connection) -> None:
    """Another tenant's row, hidden by row-level security, is in the way and not shown: an error says where to look."""
    (role,) = watcher.execute("SELECT current_database()").fetchone() or ("",)
    watcher.execute(
        f"""
        CREATE ROLE {role};
        GRANT ALL ON orders TO {role};
        CREATE UNIQUE INDEX ON orders (number);
        ALTER TABLE orders ENABLE ROW LEVEL SECURITY;
        CREATE POLICY their_own ON orders USING (merchant = 7);
        INSERT INTO orders (merchant, number) VALUES (8, 'A-17');
        """.encode()
    )
    entry = await open_postgres()
    try:
        await entry.run(f"SET ROLE {role}")
        with pytest.raises(RowNotSeen, match="row-level security policy that hides it"):
            await entry.ask(entry.orders, ORDER, unique="number")
    finally:
        await entry.rollback()
        watcher.execute(f"DROP OWNED BY {role}; DROP ROLE {role}".encode())


def test_dropped_by_a_trigger(watcher: psycopg.Connection) -> None:
    """A row that a trigger drops is neither inserted nor there, and an error says where to look."""
    watcher.execute(
        """
        CREATE FUNCTION nothing() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
        CREATE TRIGGER drops BEFORE INSERT ON orders FOR EACH ROW EXECUTE FUNCTION nothing();
        """
    )
    with pytest.raises(RowNotSeen, match="a trigger that drops it"):
        insert_or_get(watcher, "orders", ORDER, unique=KEY)


async def test_deferrable(open_postgres: Opener, watcher: psycopg.Connection) -> None:
    """A deferrable constraint is refused: it is checked too late."""
    watcher.execute("ALTER TABLE orders ADD UNIQUE (status) DEFERRABLE")
    entry = await open_postgres()
    with pytest.raises(ConfigurationError, match="NOT DEFERRABLE"):
        await entry.ask(entry.orders, ORDER | {"status": "new"}, unique="status")


NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
UUID_1 = UUID(int=1)

#: The type of a column, what is stored, the same in other words, and something else.
VALUES = [
    ("numeric(10, 2)", Decimal("19.99"), Decimal("19.990"), Decimal("19.98")),
    ("numeric(10, 2)", Decimal("0.125"), Decimal("0.125"), Decimal("0.12")),  # It is stored as 0.13.
    ("numeric", Decimal("5.0"), Decimal("5.00"), Decimal("5.01")),
    ("real", 0.1, 0.1, 0.2),  # Not 0.1 in any other precision.
    ("double precision", 0.1, 0.1, 0.1 + 1e-16 * 8),
    ("timestamptz", NOON, NOON.astimezone(timezone(timedelta(hours=9))), NOON + timedelta(microseconds=1)),
    ("timestamptz(0)", NOON + timedelta(milliseconds=1), NOON, NOON + timedelta(seconds=1)),
    ("char(5)", "abc", "abc", "abd"),
    ("varchar(5)", "abc", "abc", "ABC"),
    ("uuid", UUID_1, UUID_1, UUID(int=2)),
    ("bytea", b"\0\1", b"\0\1", b"\0\2"),
    ("integer[]", [1, 2], [1, 2], [2, 1]),
    ("jsonb", '{"a": 1, "b": 2.0}', '{"b": 2.00, "a": 1}', '{"a": 1, "b": 3}'),
    ("json", '{"a": 1, "b": 2}', '{"a": 1, "b": 2}', '{"b": 2, "a": 1}'),  # As text: it has no equality.
    ("json", '{"a": "\\u0000"}', '{"a": "\\u0000"}', '{"a": 1}'),  # Which jsonb would not take.
    ("xml", "<a/>", "<a/>", "<b/>"),
    ("point", "(1,2)", "(1,2)", "(1,3)"),
    ("mood", "glad", "glad", "sad"),
    ("cents", 5, 5, 6),
    ('"Odd ""type"', "x", "x", "y"),
    ("int4range", "[1,5)", "[1,4]", "[1,6)"),
    ("interval", timedelta(days=1), timedelta(hours=24), timedelta(hours=23)),
    ("boolean", False, False, None),
]


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
@pytest.mark.parametrize("written, values", [(written, values) for written, *values in VALUES])
async def test_values(postgres_url: str, driver: str, written: str, values: list[object]) -> None:
    """The database compares, and takes a value for what its column makes of it: what is stored twice is the same."""
    if driver == "asyncpg" and written in {"point", "int4range"}:
        values = [as_asyncpg_has_it(value) for value in values]
    with psycopg.connect(postgres_url) as connection:
        connection.execute(
            f"""
            CREATE TYPE mood AS ENUM ('glad', 'sad');
            CREATE DOMAIN cents AS bigint CHECK (VALUE > 0);
            CREATE DOMAIN "Odd ""type" AS text;
            CREATE TABLE kept (id integer UNIQUE, value {written});
            """.encode()
        )
    if driver == "psycopg":
        with psycopg.connect(postgres_url) as connection:
            got = [
                insert_or_get(connection, "kept", {"id": 1, "value": value}, unique="id", same=()) for value in values
            ]
    else:
        there = await asyncpg.connect(postgres_url)
        got = [await insert_or_get(there, "kept", {"id": 1, "value": value}, unique="id", same=()) for value in values]
        await there.close()
    assert [(each.is_new, each.differs) for each in got] == [(True, ()), (False, ()), (False, ("value",))]


def as_asyncpg_has_it(value: object) -> object:
    """Say it as asyncpg wants it: it takes no text for these."""
    ranges = {"[1,5)": asyncpg.Range(1, 5), "[1,4]": asyncpg.Range(1, 4, upper_inc=True), "[1,6)": asyncpg.Range(1, 6)}
    points = {"(1,2)": asyncpg.Point(1, 2), "(1,3)": asyncpg.Point(1, 3)}
    return (ranges | points)[str(value)]


@pytest.mark.parametrize("written, wrap", [("json", Json), ("jsonb", Jsonb)])
def test_wrapped_json(postgres_url: str, written: str, wrap: Callable[[object], object]) -> None:
    """The wrappers that psycopg has for JSON are values like others."""
    with psycopg.connect(postgres_url) as connection:
        connection.execute(f"CREATE TABLE kept (id integer UNIQUE, value {written})".encode())
        for value, differs in (({"a": 1}, ()), ({"a": 1}, ()), ({"a": 2}, ("value",))):
            got = insert_or_get(connection, "kept", {"id": 1, "value": wrap(value)}, unique="id", same=())
            assert got.differs == differs


@pytest.mark.parametrize(
    "written, stored, alike",
    [("text", 17, "17"), ("numeric(10, 2)", Decimal("1.004"), Decimal("1.001")), ("bigint", 17, Decimal(17))],
)
def test_keys_of_other_types(postgres_url: str, written: str, stored: object, alike: object) -> None:
    """The key too is taken for what its column makes of it."""
    with psycopg.connect(postgres_url) as connection:
        connection.execute(f"CREATE TABLE kept (key {written} UNIQUE)".encode())
        got = [insert_or_get(connection, "kept", {"key": key}, unique="key") for key in (stored, stored, alike)]
    assert [each.is_new for each in got] == [True, False, False]


def test_the_connections_own_rows_and_cursors(postgres_shop: str) -> None:
    """Whatever rows and cursors a connection makes for others, the row is a mapping."""
    with psycopg.connect(postgres_shop, row_factory=dict_row, cursor_factory=psycopg.ClientCursor) as connection:
        for _ in range(2):
            assert insert_or_get(connection, "orders", ORDER, unique=KEY).row["number"] == "A-17"


async def test_a_pools_connection(postgres_shop: str) -> None:
    """A connection that a pool of asyncpg's has given out is a connection; the pool is none."""
    async with asyncpg.create_pool(postgres_shop, min_size=1, max_size=1) as pool:
        async with pool.acquire() as connection:
            assert (await insert_or_get(connection, "orders", ORDER, unique=KEY)).is_new
            assert not (await insert_or_get(connection, "orders", ORDER, unique=KEY)).is_new
        with pytest.raises(ConfigurationError, match=r"needs an open connection .* it was given Pool"):
            await insert_or_get(pool, "orders", ORDER, unique=KEY)


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
async def test_odd_names(postgres_url: str, driver: str) -> None:
    """Names are quoted, whatever is in them; a schema stands before a dot."""
    key, value = 'a "b" %s', "c; -- $1 ?"
    with psycopg.connect(postgres_url) as connection:
        connection.execute(
            b"""
            CREATE SCHEMA "The Shop";
            CREATE TABLE "The Shop"."Or""ders" ("a ""b"" %s" integer UNIQUE, "c; -- $1 ?" text);
            """
        )
    into, row = 'The Shop.Or"ders', {key: 1, value: "'; DROP TABLE x; --"}
    if driver == "psycopg":
        with psycopg.connect(postgres_url) as connection:
            got = [insert_or_get(connection, into, row, unique=key) for _ in range(2)]
    else:
        there = await asyncpg.connect(postgres_url)
        got = [await insert_or_get(there, into, row, unique=key) for _ in range(2)]
        await there.close()
    assert [(each.is_new, each.row) for each in got] == [(True, row), (False, row)]


def test_autocommit(postgres_shop: str) -> None:
    """Without a transaction each statement is its own, and it works all the same."""
    with psycopg.connect(postgres_shop, autocommit=True) as connection:
        assert insert_or_get(connection, "orders", ORDER, unique=KEY).is_new
        assert not insert_or_get(connection, "orders", ORDER, unique=KEY).is_new
        assert connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
