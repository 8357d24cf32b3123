"""What is asked is checked before anything is sent, and the answers have types."""

import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from semel.errors import ConfigurationError
from semel.natural import Got, RowDiffers, insert_or_get

SOURCE = Path(__file__).parents[2] / "src"


@pytest.fixture
def connection() -> Iterator[sqlite3.Connection]:
    """It has no table, so whatever reached it would fail in another way."""
    with closing(sqlite3.connect(":memory:")) as opened:
        yield opened


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"unique": ()}, "unique= names no column"),
        ({"unique": ("number", "merchant")}, "unique= names 'merchant', and values has no such column"),
        ({"unique": "nothing"}, "'nothing' is None. .* Give a value"),
        ({"unique": "number", "same": ("totl",)}, "same= names 'totl'"),
        ({"unique": "number", "where": 5}, "where= must be the predicate of the index in SQL"),
    ],
)
def test_wrong_question(connection: sqlite3.Connection, settings: dict[str, Any], message: str) -> None:
    """What can't be right is refused, with the table's name and what to do."""
    with pytest.raises(ConfigurationError, match=f"^orders: .*{message}"):
        insert_or_get(connection, "orders", {"number": "A-17", "total": 5, "nothing": None}, **settings)


@pytest.mark.parametrize("values", [None, [("number", 1)], {1: 2}])
def test_wrong_values(connection: sqlite3.Connection, values: Any) -> None:
    """Values are a mapping from names."""
    with pytest.raises(ConfigurationError, match="values must be a mapping"):
        insert_or_get(connection, "orders", values, unique="number")


@pytest.mark.parametrize("table", ["", "shop.", "or\0ders"])
def test_no_name(connection: sqlite3.Connection, table: str) -> None:
    """What can't be a name is refused."""
    with pytest.raises(ConfigurationError, match="can't be the name of a table or a column"):
        insert_or_get(connection, table, {"number": 1}, unique="number")


def test_model_without_orm(connection: sqlite3.Connection) -> None:
    """A plain driver takes the name of a table."""
    with pytest.raises(ConfigurationError, match="Got: this driver has no models"):
        insert_or_get(connection, Got, {"number": 1}, unique="number")


def test_no_connection() -> None:
    """What is no connection is named."""
    with pytest.raises(ConfigurationError, match="joins a transaction; it was given str"):
        insert_or_get("sqlite:///shop.db", "orders", {"number": 1}, unique="number")  # type: ignore[call-overload]


def test_what_the_client_is_told() -> None:
    """The names of tables and columns are for the log; a client is told what to make of it."""
    refusal = RowDiffers("orders: total differs.", got=Got({"total": 5}, is_new=False, differs=("total",)))
    assert "total" in str(refusal)
    assert "total" not in refusal.detail
    assert (refusal.status, refusal.slug) == (422, "natural-key-reused")


def test_nothing_else_is_imported() -> None:
    """It works where nothing else is installed, and brings nothing else in."""
    program = f"""
import sys; sys.path.insert(0, {str(SOURCE)!r})
import sqlite3
from semel.natural import insert_or_get
connection = sqlite3.connect(":memory:")
connection.execute("CREATE TABLE t (a UNIQUE)")
print(insert_or_get(connection, "t", {{"a": 1}}, unique="a"))
known = sys.stdlib_module_names | {{"semel", "__main__"}}
print(sorted({{name.partition(".")[0] for name in sys.modules}} - known))
"""
    done = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("Got(row={'a': 1}, is_new=True, differs=())\n[]\n", "")
