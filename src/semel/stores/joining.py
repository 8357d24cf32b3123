"""Statements on a connection that the application has opened: they join its transaction, and nothing is committed here.

One small function for each driver. Which statements, and how to read their rows, others say.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import lru_cache
from importlib import import_module
from typing import Any, TypeVar

from semel.core.value import value
from semel.errors import ConfigurationError
from semel.stores.statement import Joined

T = TypeVar("T")
Rows = Sequence[Sequence[Any]]

#: Undefined table, column, schema.
_NO_TABLE = frozenset({"42P01", "42703", "3F000"})


@value
class Joining:
    """One connection of the application's."""

    #: ``postgresql`` or ``sqlite``.
    dialect: str
    #: Whether ``fetch`` returns what is to be awaited.
    waits: bool
    fetch: Callable[[Joined[Any]], Any]

    def run(self, joined: Joined[T]) -> Any:
        """Run one statement; on an async connection, return what is to be awaited."""
        return self._awaited(joined) if self.waits else joined.read(self.fetch(joined))

    async def _awaited(self, joined: Joined[T]) -> T:
        return joined.read(await self.fetch(joined))


def joining(connection: Any) -> Joining:
    """Return how statements are run on *connection*, by its type, so that no driver is imported."""
    kind: type = type(connection)
    made = _kind(kind)
    if made is None:
        raise ConfigurationError(
            "An open connection of psycopg, asyncpg, sqlite3, SQLAlchemy or Django is needed, or a session of "
            f"SQLAlchemy's, since its transaction is joined; this is {type(connection).__name__}."
        )
    return made(connection)


@lru_cache
def _kind(connection: type) -> Callable[[Any], Joining] | None:
    names = ((each.__module__.partition(".")[0], each.__name__) for each in connection.__mro__)
    return next((_KINDS[name] for name in names if name in _KINDS), None)


def _asyncpg(connection: Any) -> Joining:
    if not connection.is_in_transaction():
        raise _no_transaction("asyncpg: `async with connection.transaction():`")

    async def fetch(joined: Joined[Any]) -> Rows:
        rows: Rows = await connection.fetch(joined.query.numbered, *joined.in_order)
        return rows

    return Joining("postgresql", waits=True, fetch=fetch)


def _psycopg(connection: Any) -> Joining:
    _check_psycopg(connection)
    kinds, rows = import_module("psycopg"), import_module("psycopg.rows")

    def fetch(joined: Joined[Any]) -> Rows:
        # Not connection.execute: the connection may have another cursor class or row factory.
        with kinds.RawCursor(connection, row_factory=rows.tuple_row) as cursor:
            cursor.execute(joined.query.numbered.encode(), joined.in_order)
            found: Rows = cursor.fetchall() if cursor.description or _is_pipelined(connection) else []
            return found

    return Joining("postgresql", waits=False, fetch=fetch)


def _async_psycopg(connection: Any) -> Joining:
    _check_psycopg(connection)
    kinds, rows = import_module("psycopg"), import_module("psycopg.rows")

    async def fetch(joined: Joined[Any]) -> Rows:
        async with kinds.AsyncRawCursor(connection, row_factory=rows.tuple_row) as cursor:
            await cursor.execute(joined.query.numbered.encode(), joined.in_order)
            found: Rows = await cursor.fetchall() if cursor.description or _is_pipelined(connection) else []
            return found

    return Joining("postgresql", waits=True, fetch=fetch)


def _is_pipelined(connection: Any) -> bool:
    """Whether a result is described only after it was fetched. Every statement that is joined here has rows."""
    return connection.info.pipeline_status.name != "OFF"  # type: ignore[no-any-return]  # of no type that is known here


def _check_psycopg(connection: Any) -> None:
    # Without autocommit, psycopg begins a transaction with the first statement.
    if connection.autocommit and connection.info.transaction_status.name == "IDLE":
        raise _no_transaction("psycopg: `with connection.transaction():`")


def _sqlite(connection: Any) -> Joining:
    if not connection.in_transaction and _commits_by_itself(connection):
        raise _no_transaction('sqlite3: `connection.execute("BEGIN IMMEDIATE")`')

    def fetch(joined: Joined[Any]) -> Rows:
        cursor = connection.cursor()
        cursor.row_factory = None
        rows: Rows = cursor.execute(joined.query.text, joined.parameters).fetchall()
        return rows

    return Joining("sqlite", waits=False, fetch=fetch)


def _commits_by_itself(connection: Any) -> bool:
    # ``autocommit`` is new in Python 3.12; -1 says that the older ``isolation_level`` decides.
    mode = getattr(connection, "autocommit", -1)
    return mode is True or (mode not in {True, False} and connection.isolation_level is None)


def _sqlalchemy(connection: Any) -> Joining:
    text = import_module("sqlalchemy").text

    def fetch(joined: Joined[Any]) -> Rows:
        if hasattr(connection, "get_bind"):
            _check_sqlalchemy(connection.connection())
        result = connection.execute(text(joined.query.text), dict(joined.parameters))
        rows: Rows = result.all() if result.returns_rows else []
        return rows

    return Joining(_dialect_of(connection), waits=False, fetch=fetch)


def _async_sqlalchemy(connection: Any) -> Joining:
    text = import_module("sqlalchemy").text

    async def fetch(joined: Joined[Any]) -> Rows:
        if hasattr(connection, "get_bind"):
            _check_sqlalchemy(await connection.connection())
        result = await connection.execute(text(joined.query.text), dict(joined.parameters))
        rows: Rows = result.all() if result.returns_rows else []
        return rows

    return Joining(_dialect_of(connection), waits=True, fetch=fetch)


def _dialect_of(connection: Any) -> str:
    """Return the database below a connection or a session of SQLAlchemy's."""
    bound = connection.get_bind() if hasattr(connection, "get_bind") else connection
    _check_sqlalchemy(bound)
    name: str = bound.dialect.name
    if name not in {"postgresql", "sqlite"}:
        raise ConfigurationError(f"SQLAlchemy is on {name} here; messages need PostgreSQL or SQLite.")
    return name


def _check_sqlalchemy(bound: Any) -> None:
    """Refuse an engine or a connection that says that each statement commits by itself. A session's connection may
    differ from its engine.
    """
    below: Any = getattr(bound, "sync_connection", None) or bound
    options: Any = getattr(below, "get_execution_options", dict)()
    # What create_engine was given is in no option.
    said = options.get("isolation_level") or getattr(below.dialect, "_on_connect_isolation_level", None)
    if str(said).upper() == "AUTOCOMMIT":
        raise _no_transaction('SQLAlchemy: an engine without isolation_level="AUTOCOMMIT"')


def _django(connection: Any) -> Joining:
    if not connection.in_atomic_block:
        raise _no_transaction("Django: `with transaction.atomic():`")
    if connection.vendor not in {"postgresql", "sqlite"}:
        raise ConfigurationError(f"Django is on {connection.vendor} here; messages need PostgreSQL or SQLite.")

    def fetch(joined: Joined[Any]) -> Rows:
        with connection.cursor() as cursor:
            cursor.execute(joined.query.formatted, dict(joined.parameters))
            rows: Rows = cursor.fetchall() if cursor.description else []
            return rows

    return Joining(connection.vendor, waits=False, fetch=fetch)


def lacks_table(error: BaseException) -> bool:
    """Whether an *error* of a statement says that its table is missing, or an old one, whichever driver raised it."""
    around = (error, getattr(error, "orig", None), error.__cause__)
    return any(
        getattr(each, "sqlstate", None) in _NO_TABLE
        or getattr(each, "pgcode", None) in _NO_TABLE
        or (type(each).__module__ == "sqlite3" and str(each).startswith(("no such table", "no such column")))
        for each in around
    )


def _no_transaction(how: str) -> ConfigurationError:
    return ConfigurationError(
        f"No transaction is open on this connection, so this would be committed by itself. Begin one first. {how}."
    )


_KINDS: dict[tuple[str, str], Callable[[Any], Joining]] = {
    ("asyncpg", "Connection"): _asyncpg,
    ("asyncpg", "PoolConnectionProxy"): _asyncpg,
    ("django", "BaseDatabaseWrapper"): _django,
    ("django", "ConnectionProxy"): _django,
    ("psycopg", "AsyncConnection"): _async_psycopg,
    ("psycopg", "Connection"): _psycopg,
    ("sqlalchemy", "AsyncConnection"): _async_sqlalchemy,
    ("sqlalchemy", "AsyncSession"): _async_sqlalchemy,
    ("sqlalchemy", "Connection"): _sqlalchemy,
    ("sqlalchemy", "Session"): _sqlalchemy,
    ("sqlalchemy", "async_scoped_session"): _async_sqlalchemy,
    ("sqlalchemy", "scoped_session"): _sqlalchemy,
    ("sqlite3", "Connection"): _sqlite,
}

#: What ``run`` returns for an async connection.
Running = Awaitable[Any]
