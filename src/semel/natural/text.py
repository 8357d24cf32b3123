"""The statements, as text, for PostgreSQL and for SQLite. Names are quoted here and values are parameters. Nothing here
runs a statement.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from semel.errors import ConfigurationError
from semel.natural.asked import Asked
from semel.natural.flow import Rows

R = TypeVar("R")

#: The type of each column of a table as it is written in a CAST, and whether it has its own equality operator. Enums,
#: arrays and ranges borrow one, json and xml have none; those are compared as text, which never fails.
COLUMN_TYPES = """
SELECT a.attname, pg_catalog.format_type(a.atttypid, a.atttypmod), EXISTS (
    SELECT FROM pg_catalog.pg_opclass AS o JOIN pg_catalog.pg_am AS m ON m.oid = o.opcmethod
    WHERE m.amname = 'btree' AND o.opcdefault AND o.opcintype = coalesce(nullif(t.typbasetype, 0), t.oid)
)
FROM pg_catalog.pg_attribute AS a JOIN pg_catalog.pg_type AS t ON t.oid = a.atttypid
WHERE a.attrelid = CAST(CAST({} AS text) AS regclass) AND a.attnum > 0 AND NOT a.attisdropped
"""


@dataclass(frozen=True, slots=True)
class Query:
    """A statement and its parameters."""

    sql: str
    parameters: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Shape:
    """The row by columns, with values as the driver takes them."""

    #: Quoted.
    table: str
    inserted: Mapping[str, Any]
    unique: tuple[str, ...]
    compared: tuple[str, ...]
    where: str | None = None
    #: The columns to return.
    returned: str = "*"
    #: A placeholder of its own for a column that needs one.
    placeholders: Mapping[str, str] = field(default_factory=dict)


def plain(asked: Asked, into: object) -> Shape:
    """Take the names as they are: those of columns, and of a table that may have its schema before a dot."""
    if not isinstance(into, str):
        raise ConfigurationError(f"{asked.into}: this driver has no models. Give the name of the table.")
    if not (asked.where is None or isinstance(asked.where, str)):
        raise ConfigurationError(f"{asked.into}: where= must be the predicate of the index in SQL, as a string.")
    table = ".".join(map(quoted, into.split(".")))
    return Shape(table, asked.values, asked.unique, asked.compared, asked.where)


def as_dict(columns: tuple[str, ...], values: Sequence[Any]) -> dict[str, Any]:
    """Return a row as a mapping."""
    return dict(zip(columns, values, strict=True))


def quoted(name: str) -> str:
    """Quote an identifier."""
    if not name or "\0" in name:
        raise ConfigurationError(f"{name!r} can't be the name of a table or a column.")
    return '"' + name.replace('"', '""') + '"'


class Text(Generic[R]):
    """The parts that are the same in both databases."""

    def __init__(
        self,
        asked: Asked,
        shape: Shape,
        mark: Callable[[int], str],
        row: Callable[[tuple[str, ...], Sequence[Any]], R],
    ) -> None:
        """Write the n-th parameter as *mark* does, and convert results by *row*."""
        self.asked = asked
        self.row = row
        self._shape = shape
        self._mark = mark

    def insert(self) -> Query:
        """Insert the row unless its key is there."""
        shape, draft = self._shape, self._draft()
        columns = ", ".join(map(quoted, shape.inserted))
        values = ", ".join(map(draft.put, shape.inserted))
        key = ", ".join(map(quoted, shape.unique))
        where = "" if shape.where is None else f" WHERE {shape.where}"
        is_key = " AND ".join(f"{quoted(column)} IS NOT NULL" for column in shape.unique)
        holds = "" if shape.where is None else f", ({shape.where})"
        # DO UPDATE would return a stored row as well, but write a new version of it each time.
        return draft.query(
            f"INSERT INTO {shape.table} ({columns}) VALUES ({values}) "  # noqa: S608 - names are quoted
            f"ON CONFLICT ({key}){where} DO NOTHING RETURNING {shape.returned}, ({is_key}){holds}"
        )

    def _read(self, draft: _Draft, same: list[str], key: list[str]) -> Query:
        shape = self._shape
        wanted = ", ".join([shape.returned, *same])
        held = " AND ".join([*key, *([] if shape.where is None else [f"({shape.where})"])])
        return draft.query(f"SELECT {wanted} FROM {shape.table} WHERE {held}")  # noqa: S608 - names are quoted

    def _draft(self) -> _Draft:
        return _Draft(self._shape, self._mark)


class PostgresText(Text[R]):
    """PostgreSQL. The database compares, after it has cast each value to the type of its column.

    Otherwise 0.125, which a ``numeric(10, 2)`` stores as 0.13, would differ from itself on every retry.
    """

    def stored(self) -> Generator[Query, Rows, Rows]:
        """Ask for the columns' types, then for the row."""
        known = yield Query(COLUMN_TYPES.format(self._mark(1)), (self._shape.table,))
        types = {name: (written, has_equality) for name, written, has_equality in known.rows}
        draft = self._draft()
        same = [self._same(draft, column, *types[column]) for column in self._shape.compared]
        key = [f"{quoted(column)} = CAST({draft.put(column)} AS {types[column][0]})" for column in self._shape.unique]
        return (yield self._read(draft, same, key))

    @staticmethod
    def _same(draft: _Draft, column: str, written: str, has_equality: bool) -> str:  # noqa: FBT001 - as it was read
        stored, given = quoted(column), f"CAST({draft.put(column)} AS {written})"
        if not has_equality:
            stored, given = f"CAST({stored} AS text)", f"CAST({given} AS text)"
        return f"({stored} IS NOT DISTINCT FROM {given})"


class SQLiteText(Text[R]):
    """SQLite. It gives a parameter the affinity of the column that it is compared with, as in an INSERT."""

    def stored(self) -> Generator[Query, Rows, Rows]:
        """Ask for the row."""
        draft = self._draft()
        same = [f"({quoted(column)} IS {draft.put(column)})" for column in self._shape.compared]
        key = [f"{quoted(column)} = {draft.put(column)}" for column in self._shape.unique]
        return (yield self._read(draft, same, key))


class _Draft:
    """A statement under construction: parameters are numbered in the order in which they are added."""

    def __init__(self, shape: Shape, mark: Callable[[int], str]) -> None:
        self._shape = shape
        self._mark = mark
        self._parameters: list[Any] = []

    def put(self, column: str) -> str:
        self._parameters.append(self._shape.inserted[column])
        return self._shape.placeholders.get(column) or self._mark(len(self._parameters))

    def query(self, sql: str) -> Query:
        return Query(sql, tuple(self._parameters))
