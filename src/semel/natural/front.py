"""``insert_or_get``, the public function. It chooses by the connection's type, and imports only what that needs."""

from __future__ import annotations

from collections.abc import Awaitable, Coroutine, Iterable, Mapping
from importlib import import_module
from typing import Any, Protocol, TypeVar, overload

from semel.errors import ConfigurationError
from semel.natural.asked import Asked
from semel.natural.got import Got
from semel.stores.forks import importing

M = TypeVar("M")

#: The module for each type of connection, by the type's package and name, so that no driver is imported.
_KINDS = {
    ("asyncpg", "Connection"): ("semel.natural.asyncpg", "async_insert_or_get"),
    ("asyncpg", "PoolConnectionProxy"): ("semel.natural.asyncpg", "async_insert_or_get"),
    ("django", "BaseDatabaseWrapper"): ("semel.natural.django", "insert_or_get"),
    ("django", "ConnectionProxy"): ("semel.natural.django", "insert_or_get"),
    ("psycopg", "AsyncConnection"): ("semel.natural.psycopg", "async_insert_or_get"),
    ("psycopg", "Connection"): ("semel.natural.psycopg", "insert_or_get"),
    ("sqlalchemy", "AsyncConnection"): ("semel.natural.sqlalchemy", "async_insert_or_get"),
    ("sqlalchemy", "AsyncSession"): ("semel.natural.sqlalchemy", "async_insert_or_get"),
    ("sqlalchemy", "Connection"): ("semel.natural.sqlalchemy", "insert_or_get"),
    ("sqlalchemy", "Session"): ("semel.natural.sqlalchemy", "insert_or_get"),
    ("sqlalchemy", "async_scoped_session"): ("semel.natural.sqlalchemy", "async_insert_or_get"),
    ("sqlalchemy", "scoped_session"): ("semel.natural.sqlalchemy", "insert_or_get"),
    ("sqlite3", "Connection"): ("semel.natural.sqlite", "insert_or_get"),
}


class AwaitedConnection(Protocol):
    """A connection or a session that belongs to an event loop."""

    def execute(self, *args: Any, **kwargs: Any) -> Awaitable[Any]:
        """Carry out a statement."""


class PlainConnection(Protocol):
    """A connection or a session that blocks its thread."""

    def execute(self, *args: Any, **kwargs: Any) -> Fetched:
        """Carry out a statement."""


class Fetched(Protocol):
    """The result of a blocking statement."""

    def fetchall(self) -> Any:
        """Return the rows."""


class DjangoConnection(Protocol):
    """A Django connection."""

    alias: str
    vendor: str


class NamedTable(Protocol):
    """A SQLAlchemy ``Table``."""

    @property
    def fullname(self) -> str:
        """Its name, with its schema."""


@overload
def insert_or_get(
    connection: AwaitedConnection,
    into: type[M],
    values: Mapping[str, Any],
    *,
    unique: str | Iterable[str],
    same: str | Iterable[str] | None = None,
    where: Any = None,
) -> Coroutine[Any, Any, Got[M]]: ...
@overload
def insert_or_get(
    connection: AwaitedConnection,
    into: str | NamedTable,
    values: Mapping[str, Any],
    *,
    unique: str | Iterable[str],
    same: str | Iterable[str] | None = None,
    where: Any = None,
) -> Coroutine[Any, Any, Got[dict[str, Any]]]: ...
@overload
def insert_or_get(
    connection: PlainConnection | DjangoConnection,
    into: type[M],
    values: Mapping[str, Any],
    *,
    unique: str | Iterable[str],
    same: str | Iterable[str] | None = None,
    where: Any = None,
) -> Got[M]: ...
@overload
def insert_or_get(
    connection: PlainConnection,
    into: str | NamedTable,
    values: Mapping[str, Any],
    *,
    unique: str | Iterable[str],
    same: str | Iterable[str] | None = None,
    where: Any = None,
) -> Got[dict[str, Any]]: ...
def insert_or_get(
    connection: Any,
    into: Any,
    values: Mapping[str, Any],
    *,
    unique: str | Iterable[str],
    same: str | Iterable[str] | None = None,
    where: Any = None,
) -> Any:
    """Insert a row, or get the one that is stored under its key; ``got.is_new`` tells which. Nothing is committed.

    *connection* is a connection of psycopg, asyncpg, sqlite3, SQLAlchemy or Django, or a SQLAlchemy session. Its
    transaction is joined; with an async one, await the call. *into* is the name of a table, a ``Table`` or a model.
    *unique* names the columns of a unique constraint; *same* the columns in which a stored row must not differ from
    *values* (default: all), or ``RowDiffers`` is raised. *where* is the predicate of a partial unique index.
    """
    kind = _kind(connection)
    if kind is None:
        raise ConfigurationError(
            "insert_or_get needs an open connection of psycopg, asyncpg, sqlite3, SQLAlchemy or Django, or a session "
            f"of SQLAlchemy's, since it joins a transaction; it was given {type(connection).__name__}."
        )
    module, name = kind
    asked = Asked.of(_named(into), values, unique=unique, same=same, where=where)
    with importing:
        insert = getattr(import_module(module), name)
    return insert(connection, into, asked)


def _kind(connection: object) -> tuple[str, str] | None:
    names = ((each.__module__.partition(".")[0], each.__name__) for each in type(connection).__mro__)
    return next((_KINDS[name] for name in names if name in _KINDS), None)


def _named(into: Any) -> str:
    return into.__name__ if isinstance(into, type) else str(into)
