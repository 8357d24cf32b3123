"""What is special to SQLite: affinities, what a half-read statement would hold, and connections that Semel lends."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from datetime import date
from pathlib import Path

import pytest

from semel.errors import ConfigurationError
from semel.natural import RowNotSeen, insert_or_get
from semel.stores.sqlite.transactions import HandlerConnection
from tests.natural.entries import KEY, SQLITE_SCHEMA

ORDER = {"merchant": 7, "number": "A-17"}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    with closing(sqlite3.connect(tmp_path / "shop.db")) as connection:
        connection.execute(SQLITE_SCHEMA)
    return tmp_path / "shop.db"


@pytest.fixture
def connection(file: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(file)) as opened:
        yield opened


@pytest.mark.parametrize(
    "written, stored, alike, other",
    [
        ("INTEGER", 5, "5", 6),
        ("INTEGER", "x", "x", "y"),  # SQLite keeps what is no number.
        ("NUMERIC", "19.99", 19.99, 20),
        ("REAL", 5, 5.0, 5.5),
        ("TEXT", 5, "5", "5.0"),
        ("TEXT COLLATE NOCASE", "a", "A", "b"),
        ("BLOB", b"5", b"5", "5"),
        ("", 5, 5, "5"),
    ],
)
def test_values(connection: sqlite3.Connection, written: str, stored: object, alike: object, other: object) -> None:
    """A value is compared as its column's affinity and collation have it: what is stored twice is the same."""
    connection.execute(f"CREATE TABLE kept (id UNIQUE, value {written})")
    got = [
        insert_or_get(connection, "kept", {"id": 1, "value": value}, unique="id", same=())
        for value in (stored, alike, other)
    ]
    assert [(each.is_new, each.differs) for each in got] == [(True, ()), (False, ()), (False, ("value",))]


def test_autocommit(file: Path) -> None:
    """Without a transaction nothing is left open, neither by a new row nor by a stored one."""
    with closing(sqlite3.connect(file, isolation_level=None)) as connection:
        assert insert_or_get(connection, "orders", ORDER, unique=KEY).is_new
        assert not connection.in_transaction
        assert not insert_or_get(connection, "orders", ORDER, unique=KEY).is_new
        with closing(sqlite3.connect(file, timeout=0)) as other:
            other.execute("DELETE FROM orders")
            other.commit()


def test_the_connections_own_rows(file: Path) -> None:
    """Whatever a connection makes of rows for others, the row is a mapping, and its values are converted as ever."""
    with closing(sqlite3.connect(file, detect_types=sqlite3.PARSE_DECLTYPES)) as connection:
        connection.row_factory = sqlite3.Row
        connection.execute("CREATE TABLE days (day text UNIQUE, ends day_of_year)")
        sqlite3.register_converter("day_of_year", lambda said: date.fromisoformat(said.decode()))
        row = {"day": "today", "ends": "2026-01-01"}
        got = [insert_or_get(connection, "days", row, unique="day") for _ in range(2)]
    assert [each.row for each in got] == [{"day": "today", "ends": date(2026, 1, 1)}] * 2


def test_lent_by_semel(file: Path) -> None:
    """The connection that a handler is lent in atomic mode is a connection like others."""
    with closing(sqlite3.connect(file, factory=HandlerConnection)) as connection:
        assert insert_or_get(connection, "orders", ORDER, unique=KEY).is_new
        assert connection.in_transaction


def test_odd_names(connection: sqlite3.Connection) -> None:
    """Names are quoted, whatever is in them; a schema stands before a dot."""
    connection.execute('CREATE TABLE "Or""ders" ("a ""b"" ?" INTEGER UNIQUE, "c; --" TEXT)')
    row = {'a "b" ?': 1, "c; --": "'; DROP TABLE x; --"}
    got = [insert_or_get(connection, 'main.Or"ders', row, unique='a "b" ?') for _ in range(2)]
    assert [(each.is_new, each.row) for each in got] == [(True, row), (False, row)]


def test_a_key_that_is_stored_as_null(connection: sqlite3.Connection) -> None:
    """SQLite stores NULL for NaN, which is equal to nothing, so that nothing would be a retry: it is refused."""
    connection.execute("CREATE TABLE readings (at REAL UNIQUE)")
    with pytest.raises(ConfigurationError, match=r"\(at\) is NULL .* Roll back"):
        insert_or_get(connection, "readings", {"at": float("nan")}, unique="at")


def test_no_table(connection: sqlite3.Connection) -> None:
    """A table that is not there is named."""
    with pytest.raises(ConfigurationError, match="no such table: ordres"):
        insert_or_get(connection, "ordres", ORDER, unique=KEY)


def test_dropped_by_a_trigger(connection: sqlite3.Connection) -> None:
    """A row that a trigger drops is neither inserted nor there, and an error says where to look."""
    connection.execute("CREATE TRIGGER drops BEFORE INSERT ON orders BEGIN SELECT RAISE(IGNORE); END")
    with pytest.raises(RowNotSeen, match="a trigger that drops it"):
        insert_or_get(connection, "orders", ORDER, unique=KEY)


def test_old_sqlite(connection: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    """A SQLite that can't say what it inserted is refused, before anything is sent."""
    monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 34, 1))
    with pytest.raises(ConfigurationError, match=r"SQLite 3\.35 or newer"):
        insert_or_get(connection, "orders", ORDER, unique=KEY)
    assert not connection.in_transaction
