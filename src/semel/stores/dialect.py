"""Which SQL the tables of messages of a store are spoken to in, and what they are called. It runs nothing.

The outbox and the inbox join the application's transaction, so a store without transactions has neither.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from semel.core.value import value
from semel.errors import ConfigurationError
from semel.stores.base import AsyncStore, Store
from semel.stores.statement import Names

Dialect = Literal["postgresql", "sqlite"]


@value
class Messages:
    """Where the messages of a store are."""

    dialect: Dialect
    names: Names
    #: The database's name, for people.
    where: str
    #: Whether operators' changes leave a line in the audit trail.
    has_trail: bool = True


def messages_of(store: Store | AsyncStore) -> Messages:
    """Return where the messages of *store* are; raise ``ConfigurationError`` where it has no transaction to join."""
    durable = durable_of(store)
    found = _found(durable)
    if found is None:
        raise ConfigurationError(
            f"{type(durable).__name__} has no transaction to join, and the point of an outbox and an inbox is that a "
            "message and the application's own writes are one commit. Keep them in its PostgreSQL or SQLite database."
        )
    return found


def keeps_messages(store: Store | AsyncStore) -> bool:
    """Whether *store* has an outbox and an inbox."""
    return _kind_of(durable_of(store)) is not None


def durable_of(store: Any) -> Any:
    """Return the store behind a cache, where there is one: a cache holds finished answers, and no messages."""
    while (behind := getattr(store, "durable", None)) is not None:
        store = behind
    return store


def _found(store: Any) -> Messages | None:
    kind = _kind_of(store)
    return None if kind is None else kind(store)


def _postgres(store: Any) -> Messages:
    address = store.address
    return Messages("postgresql", address.names, str(address), address.audit != "off")


def _sqlite(store: Any) -> Messages:
    place = store.place
    return Messages("sqlite", place.names, str(place.path), place.audit != "off")


def _django(store: Any) -> Messages:
    from django.db import connections  # noqa: PLC0415 - it is there: the store is Django's

    vendor: Any = connections[store.alias].vendor
    if vendor not in {"postgresql", "sqlite"}:
        raise ConfigurationError(f'DATABASES["{store.alias}"] is {vendor}; messages need PostgreSQL or SQLite.')
    return Messages(vendor, Names(), f'DATABASES["{store.alias}"]')


#: By the names of their classes, so that no driver is imported.
_KINDS: dict[str, Callable[[Any], Messages]] = {
    "PostgresStore": _postgres,
    "AsyncPostgresStore": _postgres,
    "SQLiteStore": _sqlite,
    "AsyncSQLiteStore": _sqlite,
    "DjangoStore": _django,
    "AsyncDjangoStore": _django,
}


def _kind_of(store: Any) -> Callable[[Any], Messages] | None:
    ours = (each.__name__ for each in type(store).__mro__ if each.__module__.startswith("semel.stores."))
    return next((_KINDS[name] for name in ours if name in _KINDS), None)
