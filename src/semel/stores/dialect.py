"""Which database a store is on, and what its tables are called there: for statements that join any transaction on it.
Nothing is opened.
"""

from __future__ import annotations

from typing import Any

from semel.core.value import value
from semel.errors import ConfigurationError
from semel.stores.statement import Names

POSTGRESQL = "postgresql"
SQLITE = "sqlite"
#: Where the files of each are.
PACKAGES = {POSTGRESQL: "semel.stores.postgres", SQLITE: "semel.stores.sqlite"}


@value
class Dialect:
    """A database, and the names of Semel's tables in it."""

    #: ``postgresql`` or ``sqlite``.
    name: str
    names: Names
    #: Whether there is an audit trail.
    has_trail: bool = True
    #: The database's name, for people.
    where: str = "The database"


def messages_of(store: Any, what: str = "messages") -> Dialect:
    """Return where the *messages* of *store*, sync or async, are; it is an error if it has no transaction to join."""
    durable = durable_of(store)
    if isinstance(dialect := durable.dialect, Dialect):
        return dialect
    raise ConfigurationError(
        f"{type(durable).__name__} has no {what}, since it has no transaction to join: a message and the application's "
        "own writes have to be one commit. Give the PostgreSQL or SQLite database that the application writes to."
    )


def keeps_messages(store: Any) -> bool:
    """Whether *store*, sync or async, has an outbox and an inbox."""
    return durable_of(store).dialect is not None


def durable_of(store: Any) -> Any:
    """Return the store behind a cache, where there is one: a cache holds finished answers, and no messages."""
    while (behind := getattr(store, "durable", None)) is not None:
        store = behind
    return store
