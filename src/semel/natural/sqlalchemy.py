"""Natural keys on a SQLAlchemy connection or session. There is only sync code; the async function runs it in
SQLAlchemy's own greenlet.

On a session, a model is returned as an object of that session. The session is flushed first, as before a query, and an
object that it already had of the stored row is refreshed. No ORM insert event is fired, and ``__init__`` is not called.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from semel.errors import ConfigurationError
from semel.natural.asked import Asked
from semel.natural.flow import Rows, run
from semel.natural.flow import insert_or_get as flow
from semel.natural.got import Got
from semel.natural.text import COLUMN_TYPES, as_dict

try:
    from sqlalchemy import Connection, Result, Table, Text, and_, bindparam, cast, inspect, select, text
    from sqlalchemy.dialects import postgresql, sqlite
    from sqlalchemy.exc import NoInspectionAvailable
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session
    from sqlalchemy.orm import Mapper, Session, scoped_session
    from sqlalchemy.sql import ClauseElement, Executable
    from sqlalchemy.sql.elements import BindParameter
    from sqlalchemy.sql.visitors import replacement_traverse
    from sqlalchemy.types import UserDefinedType
except ImportError as error:  # pragma: no cover - seen only where the extra is missing
    raise ImportError("This needs SQLAlchemy 2. Run: pip install 'semel[sqlalchemy]'") from error

_INSERTS: Mapping[str, Any] = {"postgresql": postgresql.insert, "sqlite": sqlite.insert}


def insert_or_get(connection: Connection | Session | scoped_session[Any], into: object, asked: Asked) -> Got[Any]:
    """Insert the row, or get the stored one."""
    given = connection() if isinstance(connection, scoped_session) else connection
    target = _Target.of(into, asked)
    if isinstance(given, Connection):
        if target.mapper is not None:
            raise ConfigurationError(
                f"{asked.into}: a Connection brings no objects. Give a Session, or the table: {asked.into}.__table__."
            )
        return _run(_Language(asked, target, given), given.execute)
    # The row may refer to pending objects, and a refresh must not discard unflushed changes.
    given.flush()
    where = {"mapper": target.mapper, "clause": target.table}
    below = given.connection(bind_arguments=where)
    execute = partial(given.execute, bind_arguments=where, execution_options={"populate_existing": True})
    return _run(_Language(asked, target, below), execute)


async def async_insert_or_get(
    connection: AsyncConnection | AsyncSession | async_scoped_session[Any], into: object, asked: Asked
) -> Got[Any]:
    """Insert the row, or get the stored one."""
    given = connection() if isinstance(connection, async_scoped_session) else connection
    return await given.run_sync(insert_or_get, into, asked)


def _run(language: _Language, execute: Callable[[Executable], Result[Any]]) -> Got[Any]:
    def perform(statement: Executable) -> Rows:
        result = execute(statement)
        # A model may load a collection by a join, and then its row comes once for each element.
        rows = result.all() if language.is_plain else result.unique().all()
        return Rows(tuple(result.keys()), rows)

    return run(flow(language), perform)


@dataclass(frozen=True)
class _Target:
    """The table to insert into, or that of a model; and its columns, by the names that the caller uses."""

    entity: Any
    table: Table
    columns: Mapping[str, Any]
    mapper: Mapper[Any] | None

    @classmethod
    def of(cls, into: object, asked: Asked) -> _Target:
        found = cls._found(into, asked)
        for name, value in asked.values.items():
            if name not in found.columns:
                raise ConfigurationError(
                    f"{asked.into} has no column {name!r}. It has: {', '.join(sorted(found.columns))}."
                )
            if isinstance(value, ClauseElement) or hasattr(value, "__clause_element__"):
                raise ConfigurationError(
                    f"{asked.into}: {name!r} is given as an SQL expression, and its value can't be compared "
                    "with a stored row. Give a value, or let the column have a default."
                )
        return found

    @classmethod
    def _found(cls, into: object, asked: Asked) -> _Target:
        if isinstance(into, Table):
            return cls(into, into, {column.key: column for column in into.c}, None)
        try:
            mapper = inspect(into)
        except NoInspectionAvailable:
            mapper = None
        if not isinstance(mapper, Mapper):
            raise ConfigurationError(f"SQLAlchemy needs a Table or a mapped class, not {asked.into!r}.")
        table = mapper.local_table
        if mapper.inherits is not None or mapper.polymorphic_on is not None or not isinstance(table, Table):
            raise ConfigurationError(
                f"{asked.into} is mapped with inheritance, or to more than a table. Give the table that has the "
                "constraint."
            )
        columns = {each.key: each.columns[0] for each in mapper.column_attrs if each.columns[0] in set(table.c)}
        return cls(into, table, columns, mapper)


class _Language:
    """The statements as SQLAlchemy constructs, so that a column's type converts values as it does elsewhere."""

    def __init__(self, asked: Asked, target: _Target, connection: Connection) -> None:
        dialect = connection.dialect
        if dialect.name not in _INSERTS:
            raise ConfigurationError(f"Natural keys work on PostgreSQL and SQLite, and not on {dialect.name}.")
        if not dialect.insert_returning:
            raise ConfigurationError("Natural keys need SQLite 3.35 or newer: this one has no RETURNING.")
        self.asked = asked
        self._target = target
        self._connection = connection
        self._dialect = dialect
        self._where = text(asked.where) if isinstance(asked.where, str) else asked.where

    @property
    def is_plain(self) -> bool:
        """Whether rows are returned, and not objects."""
        return self._target.mapper is None

    def insert(self) -> Executable:
        """Insert the row unless its key is there."""
        columns = [self._target.columns[name] for name in self.asked.unique]
        inserted = _INSERTS[self._dialect.name](self._target.entity).values(dict(self.asked.values))
        unless = inserted.on_conflict_do_nothing(index_elements=columns, index_where=self._where)
        # With its own parameters: those in the conflict's predicate are literals, and would not be sent.
        holds = [] if self._where is None else [replacement_traverse(self._where, {}, _copied)]
        is_key = and_(*(column.is_not(None) for column in columns))
        statement: Executable = unless.returning(self._target.entity, is_key, *holds)
        return statement

    def stored(self) -> Generator[Executable, Rows, Rows]:
        """Ask PostgreSQL for the columns' types, for the reason given in ``text.py``; then for the row."""
        types: dict[str, tuple[str, bool]] = {}
        if self._dialect.name == "postgresql":
            known = yield text(COLUMN_TYPES.format(":table_name")).bindparams(table_name=self._table())
            types = {name: (written, has_equality) for name, written, has_equality in known.rows}
        same = [self._same(name, types).label(f"semel_{n}") for n, name in enumerate(self.asked.compared)]
        key = [self._target.columns[name] == self._given(name, types) for name in self.asked.unique]
        holds = [] if self._where is None else [self._where]
        return (yield select(self._target.entity, *same).where(*key, *holds))

    def row(self, _columns: tuple[str, ...], values: Sequence[Any]) -> Any:
        """Return the object, or make a mapping of a table's row."""
        return as_dict(tuple(self._target.columns), values) if self.is_plain else values[0]

    def _same(self, name: str, types: Mapping[str, tuple[str, bool]]) -> Any:
        column, given = self._target.columns[name], self._given(name, types)
        if types and not types[column.name][1]:
            return cast(column, Text).is_not_distinct_from(cast(given, Text))
        return column.is_not_distinct_from(given)

    def _given(self, name: str, types: Mapping[str, tuple[str, bool]]) -> Any:
        column = self._target.columns[name]
        value = bindparam(None, self.asked.values[name], type_=column.type)
        return cast(value, _Written(types[column.name][0])) if types else value

    def _table(self) -> str:
        table, quote = self._target.table, self._dialect.identifier_preparer.quote
        options = self._connection.get_execution_options()
        schema = (options.get("schema_translate_map") or {}).get(table.schema, table.schema)
        return ".".join(quote(name) for name in (schema, table.name) if name)


def _copied(element: Any, **_: Any) -> Any:
    """Return a copy of a parameter under another name; None for other elements."""
    if not isinstance(element, BindParameter):
        return None
    return bindparam(None, element.value, type_=element.type, expanding=element.expanding)


class _Written(UserDefinedType[Any]):
    """A type, written as the database writes it."""

    cache_ok = True

    def __init__(self, written: str) -> None:
        self.written = written

    def get_col_spec(self, **_: Any) -> str:
        """Write it."""
        return self.written
