"""Natural keys on a Django connection, for a model. No savepoint is needed: an existing key is not an error.

The row is made from an instance, so defaults and ``auto_now`` work, and the result is an instance as a query
would return it. ``save()`` is not called, no signal is sent, and nothing is validated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from semel.errors import ConfigurationError
from semel.natural.asked import Asked
from semel.natural.flow import Rows, run
from semel.natural.flow import insert_or_get as flow
from semel.natural.got import Got
from semel.natural.sqlite import check_version
from semel.natural.text import PostgresText, Query, Shape, SQLiteText, quoted

try:
    from django.db import connections
    from django.db.models import Model, Q
    from django.db.models.sql import InsertQuery
    from django.db.models.sql import Query as ModelQuery
    from django.utils.connection import ConnectionProxy
except ImportError as error:  # pragma: no cover - seen only where the extra is missing
    raise ImportError("A model needs Django. Run: pip install 'semel[django]'") from error

_TEXTS: Mapping[str, Any] = {"postgresql": PostgresText, "sqlite": SQLiteText}


def insert_or_get(connection: Any, into: Any, asked: Asked) -> Got[Any]:
    """Insert the row, or get the stored one."""
    if isinstance(connection, ConnectionProxy):  # django.db.connection is a proxy for this thread's connection.
        connection = connections[connection.alias]
    if connection.vendor not in _TEXTS:
        raise ConfigurationError(f"Natural keys work on PostgreSQL and SQLite, and not on {connection.vendor}.")
    if connection.vendor == "sqlite":
        check_version()
    row = _Row(connection, into, asked)

    def perform(query: Query) -> Rows:
        with connection.cursor() as cursor:
            cursor.execute(query.sql, query.parameters)
            return Rows(tuple(column[0] for column in cursor.description), cursor.fetchall())

    return run(flow(_TEXTS[connection.vendor](asked, row.shape(), lambda _: "%s", row.instance)), perform)


class _Row:
    """One row of a model, as Django would write it and read it."""

    def __init__(self, connection: Any, model: Any, asked: Asked) -> None:
        self._connection = connection
        self._model = model
        self._asked = asked
        if not (isinstance(model, type) and issubclass(model, Model)):
            raise ConfigurationError(f"Django needs a model, not {asked.into!r}.")
        meta: Any = model._meta  # type: ignore[attr-defined]  # noqa: SLF001 - Django documents it
        if any(field.model._meta.db_table != meta.db_table for field in meta.concrete_fields):  # noqa: SLF001 - the same
            raise ConfigurationError(f"{asked.into} is kept in more than one table. Use the model that has the key.")
        self._fields = [field for field in meta.concrete_fields if field.column is not None]
        #: Generated columns can't be written, and have no value before the row is inserted.
        self._written = [field for field in self._fields if not getattr(field, "generated", False)]
        self._named = {name: field for field in self._written for name in (field.name, field.attname)}
        for name, value in asked.values.items():
            if name not in self._named:
                raise ConfigurationError(f"{asked.into} has no field {name!r} with a column that can be written.")
            if hasattr(value, "resolve_expression"):
                raise ConfigurationError(
                    f"{asked.into}: {name!r} is given as an expression, and its value can't be compared with a "
                    "stored row. Give a value, or let the field have a default."
                )

    def shape(self) -> Shape:
        """Return the columns to insert and to compare."""
        instance = self._model(**self._asked.values)
        inserted: dict[str, Any] = {}
        placeholders: dict[str, str] = {}
        compiler = InsertQuery(self._model).get_compiler(connection=self._connection)
        for field in self._written:
            value = field.pre_save(instance, add=True)
            if self._is_left_to_the_database(field, value):
                continue
            inserted[field.column] = prepared = field.get_db_prep_save(value, self._connection)
            if hasattr(field, "get_placeholder"):
                placeholders[field.column] = field.get_placeholder(prepared, compiler, self._connection)
        for name in self._asked.values:
            self._check(name, inserted)
        table = self._connection.ops.quote_name(self._model._meta.db_table)  # noqa: SLF001 - Django documents it
        if "%" in table + "".join(inserted):
            raise ConfigurationError(f"{self._asked.into}: a table or column with % in its name can't be used here.")
        return Shape(
            table,
            inserted,
            self._columns(self._asked.unique),
            self._columns(self._asked.compared),
            self._where(),
            ", ".join(quoted(field.column) for field in self._fields),
            placeholders,
        )

    def instance(self, _columns: tuple[str, ...], values: Sequence[Any]) -> Any:
        """Make an instance from a row, as a query would."""
        compiler = ModelQuery(self._model).get_compiler(connection=self._connection)
        table = self._model._meta.db_table  # noqa: SLF001 - Django documents it
        converters = compiler.get_converters([field.get_col(table) for field in self._fields])
        (converted,) = compiler.apply_converters([values], converters)
        return self._model.from_db(self._connection.alias, [field.attname for field in self._fields], converted)

    def _is_left_to_the_database(self, field: Any, value: Any) -> bool:
        if value is None and field is self._model._meta.concrete_model._meta.auto_field:  # noqa: SLF001 - as save()
            return True
        # db_default, since Django 5.0.
        return type(value).__name__ == "DatabaseDefault"

    def _check(self, name: str, inserted: Mapping[str, Any]) -> None:
        column = self._named[name].column
        if column not in inserted:
            raise ConfigurationError(
                f"{self._asked.into}: {name!r} is left to the database when it is None. Leave it out."
            )
        if name in self._asked.unique and inserted[column] is None:
            raise ConfigurationError(
                f"{self._asked.into}: {name!r} has no key yet, so it would be NULL. Save it first."
            )

    def _columns(self, names: Sequence[str]) -> tuple[str, ...]:
        return tuple(self._named[name].column for name in names)

    def _where(self) -> str | None:
        where = self._asked.where
        if where is None:
            return None
        if isinstance(where, str):
            return where.replace("%", "%%")
        if not isinstance(where, Q):
            raise ConfigurationError(f"{self._asked.into}: where= must be the Q of the constraint, or SQL as a string.")
        # As a UniqueConstraint writes its condition: with literal values, since an index has no parameters.
        query = ModelQuery(self._model, alias_cols=False)
        compiler = query.get_compiler(connection=self._connection)
        sql, parameters = query.build_where(where).as_sql(compiler, self._connection)
        quote_value = self._connection.schema_editor().quote_value
        written: str = sql % tuple(quote_value(value) for value in parameters)
        return written.replace("%", "%%")
