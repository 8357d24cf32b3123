"""What a database's error means for the caller. It decides by error codes if there are any; it catches nothing."""

from __future__ import annotations

import sqlite3

from semel.errors import ConfigurationError
from semel.natural.asked import Asked

#: SQLSTATE. PostgreSQL has no such unique index; or its constraint is deferrable; or there is no such column or table.
_NO_CONSTRAINT = "42P10"
_DEFERRABLE = "55000"
_UNKNOWN = frozenset({"42703", "42P01"})
_SERIALIZATION = "40001"

#: SQLite has one code for all of these, so the message decides. It is about the statement and not about its data.
_SQLITE_NO_CONSTRAINT = "ON CONFLICT clause does not match"
_SQLITE_UNKNOWN = ("has no column named", "no such table")

_RETRY = (
    "Semel: another transaction stored a row under this key ({key}) after yours had taken its snapshot, so this "
    "transaction can neither insert it nor see it. Roll back and run the whole transaction again; or use READ "
    "COMMITTED."
)


def explain(error: Exception, asked: Asked) -> None:
    """Raise ``ConfigurationError`` if *error* means that the arguments are wrong; else only add a note, if one helps.

    A serialization failure stays the driver's own error: code that runs transactions above READ COMMITTED catches that.
    """
    origin = _origin(error)
    state = getattr(origin, "sqlstate", None) or getattr(origin, "pgcode", None)
    said = str(origin)
    is_sqlite = isinstance(origin, sqlite3.OperationalError)
    if state == _NO_CONSTRAINT or (is_sqlite and _SQLITE_NO_CONSTRAINT in said):
        raise ConfigurationError(_no_constraint(asked)) from error
    if state == _DEFERRABLE and "deferrable" in said:
        raise ConfigurationError(
            f"{asked.into}: the unique constraint on ({asked.key}) is DEFERRABLE, so it does not hold in time. Make it "
            "NOT DEFERRABLE."
        ) from error
    if state in _UNKNOWN or (is_sqlite and any(words in said for words in _SQLITE_UNKNOWN)):
        raise ConfigurationError(f"{asked.into}: {said.splitlines()[0]}.") from error
    if state == _SERIALIZATION:
        error.add_note(_RETRY.format(key=asked.key))


def _no_constraint(asked: Asked) -> str:
    columns = ", ".join(f'"{name}"' for name in asked.unique)
    if asked.where is not None:
        return (
            f"{asked.into}: no unique index is on exactly ({asked.key}) with a predicate that where= implies. "
            f"Create one: CREATE UNIQUE INDEX … ({columns}) WHERE …"
        )
    return (
        f"{asked.into}: no unique constraint is on exactly ({asked.key}). Create one: ALTER TABLE … ADD UNIQUE "
        f"({columns}), or CREATE UNIQUE INDEX … ({columns}). A partial index needs where=; one on an expression can't "
        "be used."
    )


def _origin(error: Exception) -> BaseException:
    """Return the driver's own error: SQLAlchemy has it in ``orig``, and Django as the cause."""
    return getattr(error, "orig", None) or error.__cause__ or error
